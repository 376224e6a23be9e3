"""From a first training loop to all that the toolkit does: speed and memory, one thing added at a time.

    python -m scripts.bench.ladder.ladder [--batch 1 --rounds 3] [--text FILE] [--plot FILE]
    python -m scripts.bench.ladder.ladder --model gpt2-124m --rounds 0       # dry runs alone

The first rung is a GPT in fp32 with a matrix product per head, scores in memory, a loss read in every step, and
gradients filled with zeros. The lower rungs add one thing each to that loop (ladder_gpt.py); the upper ones are
train.py. Every rung is a process of its own and takes turns with the first one, whose second copy is the first row:
what this machine cannot tell apart. Speed is the median over rounds of tokens per second and rank over the first
rung's; on a CPU also by processor time.

Memory is a rank's peak: on a GPU of its allocator, on a CPU the growth of resident memory after all imports. Beside it
stands the dry run's count for a GPU at the model's own batch, with eager blocks, on --gpus GPUs from the rung of
several ranks on. Rungs that bring nothing on a machine are not run there, and say why.

The claim, for a GPU: ten times the speed of the first rung, and a tenth of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from llmscale.config.hardware import has_bf16_instructions
from scripts.bench.harness import (
    REPOSITORY,
    Job,
    Orders,
    describe_circumstances,
    describe_machine,
    gpu_names,
    median_and_range,
    output_file,
    picture_file,
    prepare_text,
    python_environment,
    read_losses,
    save_result,
    slowest,
    status_bytes,
    whole_number,
    whole_or_zero,
    why_it_failed,
)
from scripts.bench.ladder.ladder_rungs import MODELS, VOCAB_SIZE, flags, is_parallel, list_rungs, switches, why_not
from scripts.bench.ladder.ladder_table import (
    Row,
    closing_lines,
    compare_memory,
    heading,
    judge,
    plot_ladder,
    row_line,
)

if TYPE_CHECKING:
    from llmscale.config.resolve import ResolvedRun
    from scripts.bench.ladder.ladder_gpt import Ways
    from scripts.bench.speed.training_loops import Contest

SETTINGS = ("model", "batch", "precision", "world_size", "gpus", "threads", "rounds", "steps")
RUNGS = list_rungs(REPOSITORY / "ds_configs")
WARMUP_STEPS = 2


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        run_rank_job(args)
        return 0
    # SIGTERM ends the ranks and removes what was written, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine, models = describe_machine(), {}
    names = list(MODELS) if args.model == "both" else [args.model]
    for name in names:
        models[name] = climb(args, name, lambda rows, name=name: keep(args, machine, {**models, name: rows}))
    result = keep(args, machine, models)
    lines = closing_lines(result)
    print("\n".join(lines))
    if args.text:
        tables = [line for name, rows in models.items() for line in (*head(args, name), *map(row_line, rows))]
        args.text.write_text("\n".join((*tables, *lines)) + "\n")
    if args.plot:
        plot_ladder(models, args.plot)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_gpu = bool(gpu_names())
    parser.add_argument("--model", choices=[*MODELS, "both"], default="seed", help="default: seed")
    parser.add_argument("--batch", type=whole_number,
                        help="sequences per step and rank (default: the model's on a GPU, "
                        f"of its first rung's {', '.join(f'{m.batch} for {n}' for n, m in MODELS.items())}; on a CPU "
                        f"{', '.join(f'{m.cpu_batch}' for m in MODELS.values())})")  # fmt: skip
    steps = 10 if is_gpu else 1
    parser.add_argument("--steps", type=whole_number, default=steps,
                        help="steps per turn (default: 10 on a GPU, 1 on a CPU)")  # fmt: skip
    parser.add_argument(
        "--rounds", type=whole_or_zero, default=5, help="turns of each rung (default: 5); 0: dry runs alone"
    )
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto",
                        help="fp32 leaves the rung of bf16 out; auto does where the processor has no instructions for "
                        "it (default: auto)")  # fmt: skip
    parser.add_argument("--world-size", type=whole_number, default=len(gpu_names()) or 2,
                        help="ranks from the rung of several ranks on (default: every GPU; 2 on a CPU)")  # fmt: skip
    parser.add_argument(
        "--gpus", type=whole_number, default=8, help="GPUs of the dry run from that rung on (default: 8)"
    )
    parser.add_argument("--threads", type=whole_number, default=1, help="OMP_NUM_THREADS of each rank (default: 1)")
    numbers = range(len(RUNGS))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, default=list(numbers), metavar="N",
                        help="these rungs alone, by number from 0; the first one is always run")  # fmt: skip
    parser.add_argument("--json", type=output_file, help="write the raw measurements to this file after every rung")
    parser.add_argument("--text", type=output_file, help="also write the table to this file")
    parser.add_argument("--plot", type=picture_file, help="also draw it, as PNG or SVG (extra: plot)")
    parser.add_argument("--rank-job", nargs=2, metavar=("N", "WHAT"), help=argparse.SUPPRESS)
    for name in ("--data", "--windows", "--folder"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.precision == "auto":
        args.precision = "bf16" if is_gpu or has_bf16_instructions() else "fp32"
    return args


def measured_batch(args: argparse.Namespace, model: str) -> int:
    if args.batch:
        return args.batch
    return MODELS[model].batch if gpu_names() else MODELS[model].cpu_batch


def head(args: argparse.Namespace, model: str) -> list[str]:
    return heading(model, measured_batch(args, model), is_gpu=bool(gpu_names()))


def left_out(args: argparse.Namespace) -> set[str]:
    """Return the requirements of rungs that this machine or --precision does not meet."""
    absent = set() if gpu_names() else {"gpu"}
    absent |= {"bf16"} if args.precision == "fp32" else set()
    return absent | (set() if gpu_names() or args.precision == "fp32" else {"inductor"})


def climb(args: argparse.Namespace, model: str, keep_rows: Callable[[list[Row]], object]) -> list[Row]:
    """Measure every rung of a model; print and keep each row at once."""
    print("\n".join(head(args, model)), flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:
        folder = Path(scratch)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        args.data = prepare_text(folder, MODELS[model].seq_len)
        args.windows = folder / "windows.npy"
        save_samples(args, model, folder)
        numbers = sorted({0, *args.only})
        counted = count(args, model, numbers)
        first = RungJob(args, model, 0, folder / "first", 1) if args.rounds else None
        try:
            for number in numbers:
                rows.append({**measure_rung(args, model, number, first, folder), "dry_run": counted[number]})
                compare_memory(rows)
                print(row_line(rows[-1]), flush=True)
                keep_rows(rows)
        finally:
            if first:
                first.job.kill()
    return rows


def measure_rung(args: argparse.Namespace, model: str, number: int, first: RungJob | None, folder: Path) -> Row:
    """Let a rung take turns with the first one; return its row, with the problem if it failed."""
    rung = RUNGS[number]
    row: Row = {"number": number, "rung": rung.name}
    reason = why_not(rung, is_gpu=bool(gpu_names()), world_size=args.world_size, precision=args.precision)
    if reason or first is None:
        return {**row, "not_here": reason or "--rounds 0"}
    ranks = args.world_size if is_parallel(RUNGS, number) else 1
    place = folder / f"rung-{number}"
    try:
        rung_job = RungJob(args, model, number, place, ranks)
        try:
            rounds = [take_turns(first, rung_job, turn) for turn in range(args.rounds)]
        finally:
            rung_job.job.kill()
    except SystemExit as end:
        return {**row, "problem": " ".join(str(end).split())[-300:]}
    tokens = args.steps * measured_batch(args, model) * MODELS[model].seq_len
    losses = read_losses(place / "run")
    return {
        **row,
        "ranks": ranks,
        "speed": compare(rounds, "seconds", 1),
        "processor": None if gpu_names() else compare(rounds, "cpu_s", ranks),
        "tokens_per_second_per_rank": median_and_range(tokens / taken["rung"]["seconds"] for taken in rounds),
        "memory_bytes": max(taken["rung"]["memory_bytes"] for taken in rounds),
        "first_loss": losses[min(losses)],
        "rounds": rounds,
    }


def compare(rounds: Sequence[dict], key: str, share: int) -> dict[str, float]:
    """Return how many times less a rung took than the first one in a round; `share`: ranks that share its number."""
    return median_and_range(taken["first"][key] / (taken["rung"][key] / share) for taken in rounds)


class RungJob:
    """The ranks of a rung, warm and waiting for turns."""

    def __init__(self, args: argparse.Namespace, model: str, number: int, place: Path, ranks: int) -> None:
        place.mkdir()
        options = rank_options(args, model, number, place, "train")
        self.job = Job(__spec__.name, options, ranks, threads=args.threads, log=place / "log")
        try:
            self._base_bytes = [answer["base_bytes"] for answer in self.job.answers()]
            self.job.answers()
        except BaseException:
            self.job.kill()
            raise

    def take_turn(self) -> dict[str, float]:
        """Return the seconds of a turn and the peak bytes of the rank with the most."""
        answers = self.job.order("steps")
        peaks = [answer["peak_memory_bytes"] for answer in answers]
        return {**slowest(answers), "memory_bytes": max(map(int.__sub__, peaks, self._base_bytes))}


def take_turns(first: RungJob, rung: RungJob, number: int) -> dict[str, dict[str, float]]:
    """Run one round; the two begin it alternately."""
    pair = {"first": first, "rung": rung}
    return {name: pair[name].take_turn() for name in sorted(pair, reverse=bool(number % 2))}


def rank_options(args: argparse.Namespace, model: str, number: int, place: Path, what: str) -> list[str]:
    passed_on = ("batch", "precision", "world_size", "gpus", "rounds", "steps", "data", "windows")
    given = {key: getattr(args, key) for key in passed_on if getattr(args, key) is not None}
    options = [[f"--{key.replace('_', '-')}", str(value)] for key, value in given.items()]
    command = ["--rank-job", str(number), what, "--model", model, "--folder", str(place)]
    return command + [text for option in options for text in option]


def train_arguments(
    args: argparse.Namespace, model: str, number: int, *, batch: int, ranks: int, off: set[str]
) -> list[str]:
    """Return train.py's command line for a rung; a lower rung takes its shape and samples from it."""
    shape = MODELS[model]
    values = {
        "--data": args.data,
        "--model": shape.preset,
        "--vocab-size": VOCAB_SIZE,
        "--n-layer": shape.n_layer,
        "--n-head": shape.n_head,
        "--n-embd": shape.n_embd,
        "--precision": "fp32" if "bf16" in off else "bf16",
        "--global-batch-size": batch * ranks,
        "--micro-batch-size": batch,
        "--warmup-steps": 1,
        "--steps": WARMUP_STEPS + args.rounds * args.steps + 1,
        "--num-workers": 0,
        "--save-every": 0,
        "--val-every": 0,
        "--compile": "off",
        "--run": args.folder / "run",
        **flags(RUNGS, number, off),
    }
    return [str(word) for pair in values.items() for word in pair]


def save_samples(args: argparse.Namespace, model: str, folder: Path) -> None:
    """Write the samples that every lower rung trains on."""
    from scripts.bench.speed.training_loops import prepare, save_windows

    args.folder = folder
    arguments = train_arguments(args, model, 0, batch=measured_batch(args, model), ranks=1, off=left_out(args))
    save_windows(prepare(arguments, 1), args.windows)


def count(args: argparse.Namespace, model: str, numbers: Sequence[int]) -> dict[int, Row]:
    """Return peak bytes per GPU of these rungs by the dry run, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, *rank_options(args, model, 0, args.folder / "dry", "count")]
    environment = python_environment(OMP_NUM_THREADS=str(args.threads))
    command += ["--only", *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    if done.returncode:
        problem = why_it_failed(done)
        return {number: {"problem": problem} for number in numbers}
    return dict(zip(numbers, json.loads(done.stdout.splitlines()[-1]), strict=True))


def run_rank_job(args: argparse.Namespace) -> None:
    """Train as one rank, or count by the dry run."""
    number, what = int(args.rank_job[0]), args.rank_job[1]
    if what == "count":
        print(json.dumps([count_here(args, number) for number in args.only]))
        return
    orders = Orders()
    import torch

    from scripts.bench.ladder.ladder_gpt import Ways
    from scripts.bench.speed.training_loops import Contest, Pace, prepare, run_train_py

    if not RUNGS[number].switch:
        # Imports that every rank of train.py holds before it begins.
        import deepspeed  # noqa: F401

        import llmscale.train
        import llmscale.training.open_session  # noqa: F401

    orders.answer({"base_bytes": 0 if torch.cuda.is_available() else status_bytes("VmRSS")})
    ranks = args.world_size if is_parallel(RUNGS, number) else 1
    batch, off = measured_batch(args, args.model), left_out(args)
    arguments = train_arguments(args, args.model, number, batch=batch, ranks=ranks, off=off)
    contest = Contest(prepare(arguments, ranks), arguments, args.windows, Pace(orders, WARMUP_STEPS, args.steps))
    if RUNGS[number].switch:
        train_plain(contest, Ways(**switches(RUNGS, number, off)))
    else:
        run_train_py(contest)


def count_here(args: argparse.Namespace, number: int) -> Row:
    """Return the peak bytes per GPU of a rung by the dry run."""
    from scripts.bench.ladder.ladder_gpt import Ways
    from scripts.bench.speed.training_loops import prepare

    batch, ranks = MODELS[args.model].batch, args.gpus if is_parallel(RUNGS, number) else 1
    arguments = train_arguments(args, args.model, number, batch=batch, ranks=ranks, off=set())
    resolved = prepare(arguments, ranks).resolved
    if RUNGS[number].switch:
        counted = count_plain(resolved, Ways(**switches(RUNGS, number, set())))
    else:
        counted = count_product(resolved)
    return {"batch": batch, "ranks": ranks, "bytes": counted}


def train_plain(contest: Contest, ways: Ways) -> None:
    """Train a lower rung on the samples of `contest.windows` in a loop until the process is killed.

    The first loss is written where train.py would write it.
    """
    import numpy as np
    import torch

    from llmscale.engine.device_settings import allow_tf32
    from llmscale.model.gpt import GPT
    from llmscale.training.run_folder import METRICS_NAME
    from scripts.bench.ladder.ladder_gpt import NaiveGPT

    resolved = contest.run.resolved
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allow_tf32("fp32")
    model = NaiveGPT(resolved.shape, ways)
    model.take_weights(GPT(resolved.shape, seed=contest.run.config.seed))
    model.to(device)
    optimizer = model.build_optimizer(1e-4, is_gpu=device.type == "cuda")
    windows, batch = np.load(contest.windows, mmap_mode="r"), resolved.plan.micro_batch_size
    for step in itertools.count():
        begin = step * batch % (len(windows) - batch + 1)
        tokens = torch.from_numpy(windows[begin : begin + batch].astype(np.int64)).to(device, non_blocking=True)
        loss = model.train_step(tokens, optimizer)
        if step % ways.reads_loss_every == 0:
            value = loss.item()
            if step == 0:
                contest.run.config.run.mkdir(parents=True)
                record = {"kind": "train", "step": 1, "loss": value}
                (contest.run.config.run / METRICS_NAME).write_text(json.dumps(record) + "\n")
        contest.pace.step_done()


def count_plain(resolved: ResolvedRun, ways: Ways) -> int:
    """Return the peak bytes of tensors over two steps on a GPU of Ampere or newer."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from llmscale.dry_run.simulated_gpu import GPU, cuda_kernels, fake_gpu, fake_tensors_move, kernel_workspace
    from llmscale.dry_run.tracker import Category, MemoryTracker
    from scripts.bench.ladder.ladder_gpt import NaiveGPT

    batch, shape = resolved.plan.micro_batch_size, resolved.shape
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_gpu())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(fake_tensors_move())
        stack.enter_context(cuda_kernels())
        # Fake tensors have no values, and AdamW divides by a function of its count of steps.
        stack.enter_context(mock.patch("torch.optim.adam._get_value", lambda _: 1.0))
        tracker = stack.enter_context(MemoryTracker(device=GPU, workspace=kernel_workspace))
        with tracker.phase("all", Category.TEMPORARIES):
            model = NaiveGPT(shape, ways).to(GPU)
            optimizer = model.build_optimizer(1e-4, is_gpu=True)
            for _ in range(2):
                tokens = torch.zeros((batch, shape.seq_len + 1), dtype=torch.long, device=GPU)
                model.train_step(tokens, optimizer)
        return tracker.peaks()["all"].total_bytes


def count_product(resolved: ResolvedRun) -> int:
    """Return the peak bytes of tensors per GPU by the dry run of the real engine, with eager blocks."""
    from llmscale.dry_run.engine import dry_run

    result = dry_run(resolved)
    return max(moment.total_bytes for moment in (result.forward, result.backward, result.step))


def keep(args: argparse.Namespace, machine: dict[str, object], models: dict[str, list[Row]]) -> dict:
    """Return the result so far, after writing it to the file of --json."""
    result = {
        **describe_circumstances(machine, args, SETTINGS),
        "batches": {name: measured_batch(args, name) for name in models},
        "models": models,
        "claim": {name: judge(rows, is_gpu=bool(gpu_names())) for name, rows in models.items()},
    }
    save_result(args.json, result)
    return result


if __name__ == "__main__":
    sys.exit(main())
