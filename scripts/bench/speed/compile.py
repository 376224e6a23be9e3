"""Measure --compile: train.py with compiled blocks beside eager ones, per ZeRO stage and activation checkpointing.

    python -m scripts.bench.speed.compile
    python -m scripts.bench.speed.compile --model gpt2-124m --layers 12 --precision bf16      # on a GPU

Both runs of a pair train the same model on the same samples, each in processes of its own, and take turns. Printed are
median and range of the ratio of their tokens/s within a round, and the seconds of the first steps with empty compiler
caches. On a CPU in 16 bit blocks are traced and not compiled, so there is nothing to gain.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from scripts.bench.harness import (
    Job,
    Orders,
    describe_circumstances,
    describe_machine,
    machine_line,
    median_and_range,
    prepare_text,
    save_result,
    show_range,
    slowest,
    whole_number,
    words,
)
from scripts.bench.speed.engine_overhead import add_run_arguments

WAYS = ("off", "on")
SETTINGS = ("model", "layers", "seq_len", "batch", "precision", "world_size", "threads", "rounds", "steps")
WARMUP_STEPS = 3


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        run_rank_job(args)
        return 0
    # SIGTERM ends the ranks and removes what was written, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine, rows = describe_machine(), []
    print(f"{'ZeRO':<6}{'checkpointing':<15}{'compiled over eager':<24}{'first step':<18}{'compiled':<22}last losses")
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        args.data = args.data.absolute() if args.data else prepare_text(Path(scratch), args.seq_len)
        for stage, mode in itertools.product(args.stages, args.modes):
            folder = Path(scratch) / f"{stage}-{mode}"
            folder.mkdir()
            rows.append({"zero_stage": stage, "checkpointing": mode, **compete(args, stage, mode, folder)})
            print(format_row(rows[-1]), flush=True)
            save_result(args.json, {**describe_circumstances(machine, args, SETTINGS), "rows": rows})
    print(machine_line(machine))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "autocast"], help="default: fp32")
    parser.add_argument("--rounds", type=whole_number, default=8, help="turns of each run (default: 8)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4), help="default: all")
    modes = ["none", "selective", "full"]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="default: all")
    parser.add_argument("--rank-job", nargs=3, metavar=("STAGE", "MODE", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def compete(args: argparse.Namespace, stage: int, mode: str, folder: Path) -> dict[str, object]:
    """Let both runs take turns; return the ratio of their speeds, their first steps and their last losses."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    jobs, rounds = {}, []
    try:
        for setting in WAYS:
            options = rank_options(args, stage, mode, setting, folder)
            log = folder / f"{setting}.log"
            jobs[setting] = Job(__spec__.name, options, args.world_size, threads=args.threads, log=log)
            jobs[setting].answers()  # warm
        for number in range(args.rounds):
            order = WAYS if number % 2 else WAYS[::-1]
            taken = {setting: slowest(jobs[setting].order("steps"))["seconds"] for setting in order}
            rounds.append(taken)
        losses = {setting: job.order("end")[0]["loss"] for setting, job in jobs.items()}
        for job in jobs.values():
            job.finish()
    finally:
        for job in jobs.values():
            job.kill()
    ratios = [taken["off"] / taken["on"] for taken in rounds]
    logs = {setting: (folder / f"{setting}.log").read_text() for setting in WAYS}
    first_steps = {setting: float(re.findall(r"first step (\d+\.\d+)", logs[setting])[0]) for setting in WAYS}
    return {
        "ratio": median_and_range(ratios),
        "eager_tokens_per_second": median_and_range(args.steps * args.batch * args.seq_len / r["off"] for r in rounds),
        "first_step_s": first_steps,
        "blocks": re.findall(r"(?:blocks: |WARNING: )(.*compiled? .*|.*compiled nothing.*)", logs["on"])[-1],
        "last_losses": losses,
    }


def rank_options(args: argparse.Namespace, stage: int, mode: str, setting: str, folder: Path) -> list[str]:
    passed_on = ("model", "layers", "seq_len", "precision", "batch", "world_size", "rounds", "steps", "data")
    options = [[f"--{key.replace('_', '-')}", str(getattr(args, key))] for key in passed_on]
    places = ["--rank-job", str(stage), mode, setting, "--folder", str(folder)]
    return [*places, *(text for option in options for text in option)]


def run_rank_job(args: argparse.Namespace) -> None:
    """Run train.py as one rank."""
    from scripts.bench.speed.training_loops import Contest, Pace, prepare, run_train_py

    orders, (stage, mode, setting) = Orders(), args.rank_job
    settings = (
        f"--ds zero{stage} --model {args.model} --n-layer {args.layers} --precision {args.precision} "
        f"--activation-checkpointing {mode} --compile {setting} --global-batch-size {args.batch} "
        f"--micro-batch-size {args.batch // args.world_size} --steps {WARMUP_STEPS + args.rounds * args.steps} "
        "--warmup-steps 2 --num-workers 0 --save-every 0 --val-every 0"
    )
    arguments = [*words(settings), "--data", str(args.data), "--run", str(args.folder / setting)]
    pace = Pace(orders, WARMUP_STEPS, args.steps)
    contest = Contest(prepare(arguments, args.world_size), arguments, args.folder / "unused", pace)
    orders.answer({"loss": run_train_py(contest)})


def format_row(row: dict) -> str:
    ratio, first, losses = row["ratio"], row["first_step_s"], row["last_losses"]
    spread = show_range(ratio)
    starts = f"{first['off']:.1f} -> {first['on']:.1f} s"
    losses = f"{losses['off']:.5f} {losses['on']:.5f}"
    return f"{row['zero_stage']:<6}{row['checkpointing']:<15}{spread:<24}{starts:<18}{row['blocks'][:60]:<22}  {losses}"


if __name__ == "__main__":
    sys.exit(main())
