#!/usr/bin/env python3
"""What --compile brings: train.py with compiled blocks beside eager ones, per ZeRO stage and activation checkpointing.

    python scripts/bench/compile.py --json result.json
    python scripts/bench/compile.py --model gpt2-124m --layers 12 --precision bf16      # on a GPU

Both runs of a pair train the same model on the same samples, each in processes of its own, and take turns of a few
steps; what is printed is the median over the rounds of the ratio of their tokens/s within a round, with the range.
Beside it stand the seconds of the first step, cold: the compiler's caches are empty for every pair.
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

from engine_overhead import add_run_arguments, prepare_text, slowest
from flag_types import whole_number
from machine import describe_circumstances, describe_machine, median_and_range, save_result, show_range
from paced_ranks import REPOSITORY, Job, Orders

sys.path.insert(0, str(REPOSITORY))

WAYS = ("off", "on")
SETTINGS = ("model", "layers", "seq_len", "batch", "precision", "world_size", "threads", "rounds", "steps")
WARMUP_STEPS = 3


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        run_rank_job(args)
        return 0
    # A stop from outside ends the ranks and removes what was written, as Ctrl-C does.
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
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "autocast"], help="default: fp32")
    parser.add_argument("--rounds", type=whole_number, default=8, help="turns of each run (default: 8)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4), help="default: all")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=["none", "selective", "full"],
        default=["none", "selective", "full"],
        help="default: none selective full",
    )
    parser.add_argument("--rank-job", nargs=3, metavar=("STAGE", "MODE", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def compete(args: argparse.Namespace, stage: int, mode: str, folder: Path) -> dict[str, object]:
    """Let both ways take turns; their ratio, what their starts took and their last losses."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    jobs, rounds = {}, []
    try:
        for way in WAYS:
            command = rank_command(args, stage, mode, way, folder)
            jobs[way] = Job(command, args.world_size, threads=args.threads, log=folder / f"{way}.log")
            jobs[way].answers()  # warm
        for number in range(args.rounds):
            order = WAYS if number % 2 else WAYS[::-1]
            taken = {way: slowest(jobs[way].order("steps"))["seconds"] for way in order}
            rounds.append(taken)
        losses = {way: job.order("end")[0]["loss"] for way, job in jobs.items()}
        for job in jobs.values():
            job.finish()
    finally:
        for job in jobs.values():
            job.kill()
    ratios = [taken["off"] / taken["on"] for taken in rounds]
    said = {way: (folder / f"{way}.log").read_text() for way in WAYS}
    first_steps = {way: float(re.findall(r"first step (\d+\.\d+)", said[way])[0]) for way in WAYS}
    return {
        "ratio": median_and_range(ratios),
        "eager_tokens_per_second": median_and_range(args.steps * args.batch * args.seq_len / r["off"] for r in rounds),
        "first_step_s": first_steps,
        "blocks": re.findall(r"(?:blocks: |WARNING: )(.*compiled? .*|.*compiled nothing.*)", said["on"])[-1],
        "last_losses": losses,
    }


def rank_command(args: argparse.Namespace, stage: int, mode: str, way: str, folder: Path) -> list[str]:
    passed_on = ("model", "layers", "seq_len", "precision", "batch", "world_size", "rounds", "steps", "data")
    options = [[f"--{key.replace('_', '-')}", str(getattr(args, key))] for key in passed_on]
    places = ["--rank-job", str(stage), mode, way, "--folder", str(folder)]
    return [__file__, *places, *(text for option in options for text in option)]


def run_rank_job(args: argparse.Namespace) -> None:
    """Inside a rank: train.py itself."""
    from contestants import Contest, Pace, prepare, run_train_py

    orders, (stage, mode, way) = Orders(), args.rank_job
    arguments = [
        *("--ds", str(REPOSITORY / "ds_configs" / f"zero{stage}.json"), "--data", str(args.data)),
        *("--model", args.model, "--n-layer", str(args.layers), "--precision", args.precision),
        *("--activation-checkpointing", mode, "--compile", way),
        *("--global-batch-size", str(args.batch), "--micro-batch-size", str(args.batch // args.world_size)),
        *("--steps", str(WARMUP_STEPS + args.rounds * args.steps), "--warmup-steps", "2", "--num-workers", "0"),
        *("--save-every", "0", "--val-every", "0", "--run", str(args.folder / way)),
    ]
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
