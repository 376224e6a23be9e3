"""Measure train.py's cost per step: ZeRO 0-3, DeepSpeed's engine alone and Hugging Face Trainer beside a plain loop.

    python -m scripts.bench.speed.engine_overhead
    python -m scripts.bench.speed.engine_overhead --model gpt2-124m --layers 12 --precision autocast      # on a GPU
    python -m scripts.bench.speed.engine_overhead --model tiny-1m --seq-len 128 --batch 32 --steps 10 --starts 0 \\
        --only "plain loop" "engine, ZeRO-2" "train.py, ZeRO-2"                                     # own share

All contestants train the same model on the same samples, with the same optimizer, clipping and schedule; equal last
losses are the evidence. Each runs in processes of its own, and they take turns of a few steps, so other load falls on
all of them. Ratios to the plain loop are taken within a round. A process keeps the luck of its memory layout, a few per
cent, so --sets sets of fresh processes are measured, and the printed range is the one between their medians. A second
plain loop shows what this machine cannot tell apart. Processor seconds hardly change with other load.

Own share: processor seconds of train.py outside the engine's forward, backward and step (data, agreement, logging).
At last the time from `deepspeed --num_gpus N llmscale/train.py ...` to its first step is taken.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.harness import (
    REPOSITORY,
    Job,
    Orders,
    describe_circumstances,
    describe_machine,
    gpu_names,
    machine_line,
    median_and_range,
    output_file,
    prepare_text,
    preset_name,
    save_result,
    show_range,
    slowest,
    whole_number,
    whole_or_zero,
    words,
)

#: Contestant -> (loop, ZeRO stage of its ds_config).
CONTESTANTS = {
    "plain loop": ("plain", 0),
    "plain loop again": ("plain", 0),
    "Trainer, ZeRO-2": ("trainer", 2),
    **{f"engine, ZeRO-{stage}": ("engine", stage) for stage in range(4)},
    **{f"train.py, ZeRO-{stage}": ("train.py", stage) for stage in range(4)},
}
SETTINGS = ("model", "layers", "seq_len", "batch", "precision", "world_size", "threads", "sets", "rounds", "steps")
WARMUP_STEPS = 3
WINDOWS = "windows.npy"
Round = dict[str, dict[str, float]]


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        run_rank_job(args)
        return 0
    # SIGTERM ends the ranks and removes what was written, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="engine-overhead-") as scratch:
        folder = Path(scratch)
        args.data = args.data.absolute() if args.data else prepare_text(folder, args.seq_len)
        save_samples(args, folder)
        sets, losses = [], {}
        for number in range(args.sets):
            (folder / f"set-{number}").mkdir()
            rounds, losses = compete(args, folder / f"set-{number}", folder / WINDOWS)
            sets.append(rounds)
            print(f"set {number + 1}/{args.sets}", file=sys.stderr, flush=True)
        first_steps = [time_first_step(args, folder, number) for number in range(args.starts)]
    result = {
        **describe_circumstances(machine, args, SETTINGS),
        "tokens_per_block": args.steps * args.batch * args.seq_len,
        "wall": summarize(sets, "seconds"),
        "processor": summarize(sets, "cpu_s"),
        "own_share": own_shares(sets),
        "last_losses": losses,
        "first_step": first_steps,
        "sets": sets,
    }
    print(format_result(result))
    save_result(args.json, result)
    return 0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model, data, ranks and result file."""
    parser.add_argument("--model", type=preset_name, default="tiny-10m", help="preset (default: tiny-10m)")
    parser.add_argument("--layers", type=whole_number, default=4, help="blocks, instead of the preset's (default: 4)")
    parser.add_argument("--seq-len", type=whole_number, default=256, help="of the text that is prepared (default: 256)")
    parser.add_argument("--batch", type=whole_number, default=8, help="sequences per step over all ranks (default: 8)")
    parser.add_argument("--world-size", type=whole_number, default=1, help="ranks of each run (default: 1)")
    parser.add_argument("--threads", type=whole_number, default=1, help="OMP_NUM_THREADS of each rank (default: 1)")
    parser.add_argument("--steps", type=whole_number, default=1, help="steps per turn (default: 1)")
    parser.add_argument("--data", type=Path, help="a dataset of --seq-len (default: the standard library)")
    parser.add_argument("--json", type=output_file, help="write the raw measurements to this file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "autocast"], help="default: fp32")
    parser.add_argument("--sets", type=whole_number, default=3, help="sets of fresh processes (default: 3)")
    parser.add_argument("--rounds", type=whole_number, default=8, help="turns of each contestant per set (default: 8)")
    parser.add_argument("--starts", type=whole_or_zero, default=3, help="times the start is taken (default: 3)")
    parser.add_argument("--only", nargs="*", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--rank-job", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--windows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "plain loop" not in args.only:
        parser.error("--only must keep 'plain loop': everything is compared with it")
    return args


def save_samples(args: argparse.Namespace, folder: Path) -> None:
    """Write the samples that every contestant trains on, in order."""
    from scripts.bench.speed.training_loops import prepare, save_windows

    save_windows(prepare(train_arguments(args, "plain loop", folder), args.world_size), folder / WINDOWS)


def train_arguments(args: argparse.Namespace, name: str, folder: Path) -> list[str]:
    """Return train.py's command line for a contestant."""
    stage = CONTESTANTS[name][1]
    total_steps = WARMUP_STEPS + args.rounds * args.steps
    settings = (
        f"--ds zero{stage} --model {args.model} --n-layer {args.layers} --precision {args.precision} "
        f"--global-batch-size {args.batch} --micro-batch-size {args.batch // args.world_size} --steps {total_steps} "
        "--warmup-steps 2 --num-workers 0 --save-every 0 --val-every 0"
    )
    return [*words(settings), "--data", str(args.data), "--run", str(folder / name)]


def compete(args: argparse.Namespace, folder: Path, windows: Path) -> tuple[list[Round], dict[str, float]]:
    """Let all contestants take turns; return seconds by round and contestant, and the last losses."""
    jobs: dict[str, Job] = {}
    rounds = []
    try:
        for name in args.only:
            log = folder / f"{name}.log"
            options = rank_options(args, name, folder, windows)
            jobs[name] = Job(__spec__.name, options, args.world_size, threads=args.threads, log=log)
        for job in jobs.values():
            job.answers()  # warm
        for number in range(args.rounds):
            first = number % len(jobs)
            order = args.only[first:] + args.only[:first]
            rounds.append({name: slowest(jobs[name].order("steps")) for name in order})
        losses = {name: job.order("end")[0]["loss"] for name, job in jobs.items()}
        for job in jobs.values():
            job.finish()
    finally:
        for job in jobs.values():
            job.kill()
    return rounds, losses


def rank_options(args: argparse.Namespace, name: str, folder: Path, windows: Path) -> list[str]:
    passed_on = ("model", "layers", "precision", "batch", "world_size", "rounds", "steps", "data")
    options = [[f"--{key.replace('_', '-')}", str(getattr(args, key))] for key in passed_on]
    places = ["--folder", str(folder), "--windows", str(windows)]
    return ["--rank-job", name, *places, *(text for option in options for text in option)]


def run_rank_job(args: argparse.Namespace) -> None:
    """Train as one rank of a contestant."""
    from scripts.bench.speed.training_loops import CONTESTANT_LOOPS, Contest, Pace, prepare

    orders = Orders()
    arguments = train_arguments(args, args.rank_job, args.folder)
    contest = Contest(
        run=prepare(arguments, args.world_size),
        arguments=arguments,
        windows=args.windows,
        pace=Pace(orders, WARMUP_STEPS, args.steps),
    )
    loss = CONTESTANT_LOOPS[CONTESTANTS[args.rank_job][0]](contest)
    orders.answer({"loss": loss})


def time_first_step(args: argparse.Namespace, folder: Path, number: int) -> dict[str, object]:
    """Return seconds from the launcher's command to the line of step 1, and train.py's line of start-up phases."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(launcher_ranks())]
    command += [str(REPOSITORY / "llmscale" / "train.py"), "--ds", str(REPOSITORY / "ds_configs" / "zero2.json")]
    command += ["--data", str(args.data), "--model", args.model, "--n-layer", str(args.layers), "--steps", "1"]
    command += ["--global-batch-size", str(args.batch), "--run", str(folder / f"start-{number}"), "--verbose"]
    began, seconds, phases, lines = time.perf_counter(), None, "", []
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as launcher:
        try:
            for line in launcher.stdout:
                lines.append(line)
                if line.startswith("start-up: "):
                    phases = line.strip()
                if seconds is None and line.startswith("step      1/"):
                    seconds = time.perf_counter() - began
        except BaseException:
            launcher.terminate()  # ends its ranks
            launcher.wait()
            raise
    if launcher.returncode or seconds is None:
        raise SystemExit(f"the start failed:\n{''.join(lines[-40:])}")
    return {"ranks": launcher_ranks(), "seconds": seconds, "phases": phases}


def launcher_ranks() -> int:
    """Return the number of GPUs, or 2 without one."""
    return len(gpu_names()) or 2


def summarize(sets: list[list[Round]], key: str) -> dict[str, dict[str, float]]:
    """Return each contestant's median seconds of a turn, and its speed over the plain loop's of the same round."""
    return {
        name: {
            "block_s": statistics.median(taken[name][key] for rounds in sets for taken in rounds),
            **ratio(sets, key, name),
        }
        for name in sorted(sets[0][0], key=list(CONTESTANTS).index)
    }


def ratio(sets: list[list[Round]], key: str, name: str, baseline: str = "plain loop") -> dict[str, float]:
    """Return the speed of `name` over `baseline`'s within rounds: median and range of the sets' medians."""
    medians = [statistics.median(taken[baseline][key] / taken[name][key] for taken in rounds) for rounds in sets]
    return {"ratio": statistics.median(medians), "min": min(medians), "max": max(medians)}


def own_shares(sets: list[list[Round]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return train.py's own share of a step by stage and method: median and range of the sets' medians.

    inside: its processor seconds outside the engine; wall, processor: (its step - the engine's alone) / its step.
    """
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for train, engine in ((f"train.py, ZeRO-{stage}", f"engine, ZeRO-{stage}") for stage in range(4)):
        if train not in sets[0][0]:
            continue
        inside = [
            statistics.median(1 - taken[train]["engine_cpu_s"] / taken[train]["cpu_s"] for taken in rounds)
            for rounds in sets
        ]
        shares[train] = {"inside": {"share": statistics.median(inside), "min": min(inside), "max": max(inside)}}
        for clock, key in (("wall", "seconds"), ("processor", "cpu_s")) if engine in sets[0][0] else ():
            of_engine = ratio(sets, key, train, engine)
            share = {"share": 1 - of_engine["ratio"], "min": 1 - of_engine["max"], "max": 1 - of_engine["min"]}
            shares[train][clock] = share
    return shares


def format_result(result: dict) -> str:
    def column(values: dict[str, float]) -> str:
        return f"{values['ratio']:.3f} ({values['min']:.3f}-{values['max']:.3f})"

    lines = [f"{'':<18}{'tokens/s':<22}{'of the plain loop, wall':<26}{'by processor time':<26}{'last loss':>10}"]
    for name, wall in result["wall"].items():
        blocks = [taken[name]["seconds"] for rounds in result["sets"] for taken in rounds]
        loss = result["last_losses"][name]
        rate = show_range(median_and_range(result["tokens_per_block"] / seconds for seconds in blocks), ",.0f")
        columns = f"{column(wall):<26}{column(result['processor'][name]):<26}"
        lines.append(f"{name:<18}{rate:<22}{columns}{loss:>10.5f}")
    lines.append("median (smallest-largest) of the sets' medians; tokens/s: of all rounds")
    if {"Trainer, ZeRO-2", "train.py, ZeRO-2"} <= set(result["wall"]):
        pair = [ratio(result["sets"], key, "train.py, ZeRO-2", "Trainer, ZeRO-2") for key in ("seconds", "cpu_s")]
        lines.append(f"train.py of Trainer, both at ZeRO-2: wall {column(pair[0])}, processor {column(pair[1])}")
    names = {"inside": "outside of its engine", "wall": "beside the engine alone, wall", "processor": "processor"}
    for name, shares in result["own_share"].items():
        texts = [
            f"{names[kind]} {own['share']:.1%} ({own['min']:.1%} to {own['max']:.1%})" for kind, own in shares.items()
        ]
        lines.append(f"{name}'s own share of a step: {', '.join(texts)}")
    for start in result["first_step"]:
        lines.append(f"command to first step, {start['ranks']} ranks: {start['seconds']:.1f} s | {start['phases']}")
    lines.append(machine_line(result["machine"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
