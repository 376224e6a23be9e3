#!/usr/bin/env python3
"""Save under every (ds_config, world size), resume under every other, and print how far the losses are from the
uninterrupted run's.

    python scripts/bench/resume_matrix.py                          # the whole matrix, 18 x 18 cells
    python scripts/bench/resume_matrix.py --configs zero1,zero3 --worlds 1,2

A cell is the largest relative difference over the steps after the resume between the resumed run and the uninterrupted
run of the configuration that resumes; `=` means that every loss is equal to the last bit. Exit status 1 when a cell is
above --tolerance, or when a cell of the same ds_config and world size is not `=`.

In fp32 the differences come from sums taken in another order (another world size, another bucket). In bf16 they start
from the rounding of one weight or gradient, 2^-9 = 2e-3 relative, so that is the tolerance to give: --tolerance 2e-3.

Each world size is one job of real gloo ranks that builds engine after engine; the data come from a prepared set through
the real feed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from flag_types import output_file, whole_number
from machine import save_result

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        run_rank_job(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="resume-matrix-") as scratch:
        folder = Path(scratch)
        prepare_text(folder)
        for phase in ("save", "resume"):
            for world_size in args.worlds:
                start_job(args, phase, world_size, folder)
        results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("losses-*.json"))}
    return report(args, {key: value for losses in results.values() for key, value in losses.items()})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=lambda text: text.split(","), default=list(CONFIGS))
    parser.add_argument("--worlds", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--block", default="gpt2", choices=["gpt2", "llama"], help="kind of layers (default: gpt2)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16", "autocast"])
    parser.add_argument("--steps", type=whole_number, default=20, help="steps after the resume (default: 20)")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default: 1e-5)")
    parser.add_argument("--json", type=output_file, help="also write the cells to this file")
    parser.add_argument("--rank-job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare_text(folder: Path) -> None:
    """A small set of real text: this repository's own prose and code would change, so a fixed part of the library's."""
    command = [sys.executable, "-m", "llmscale.cli.main", "data", "prepare", "--input", json.__path__[0]]
    command += ["--out", str(folder / "set"), "--tokenizer", "bytes", "--seq-len", "32", "--val-fraction", "0"]
    subprocess.run([*command, "--workers", "1"], check=True, env=environment(), stdout=subprocess.DEVNULL)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def start_job(args: argparse.Namespace, phase: str, world_size: int, folder: Path) -> None:
    """One job of `world_size` ranks; its losses land in folder/losses-<phase>-<world_size>.json."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--rank-job", phase, "--folder", str(folder)]
    command += ["--configs", ",".join(args.configs), "--worlds", ",".join(map(str, args.worlds))]
    command += [
        "--block",
        args.block,
        "--precision",
        args.precision,
        "--steps",
        str(args.steps),
        "--dropout",
        str(args.dropout),
    ]
    ranks = [
        subprocess.Popen(
            command,
            env=environment()
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(world_size)
    ]
    try:
        if any([rank.wait() for rank in ranks]):
            raise SystemExit(f"the {phase} job of {world_size} ranks failed")
    finally:
        for rank in ranks:
            rank.kill()


def run_rank_job(args: argparse.Namespace) -> None:
    """Inside a rank: train and save, or resume from every checkpoint there is."""
    import torch
    from resume_matrix_rank import train

    from llmscale.engine.process_group import join_world, leave_world

    torch.set_num_threads(1)
    world = join_world()
    losses = {}
    for config in args.configs:
        if args.rank_job == "save":
            losses[f"{config}/{world.world_size}"] = train(args, config, world, None)
            continue
        for saved_config in args.configs:
            for saved_world in args.worlds:
                source = args.folder / f"run-{saved_config}-{saved_world}"
                key = f"{saved_config}/{saved_world} -> {config}/{world.world_size}"
                losses[key] = train(args, config, world, source)
    if world.is_main:
        path = args.folder / f"losses-{args.rank_job}-{world.world_size}.json"
        path.write_text(json.dumps(losses))
    leave_world()


def report(args: argparse.Namespace, losses: dict[str, list[float]]) -> int:
    """Print the matrix, rows saved, columns resumed; returns the exit status."""
    names = [f"{config}/{world}" for config in args.configs for world in args.worlds]
    cells = {}
    for key, resumed in losses.items():
        if " -> " in key:
            straight = losses[key.split(" -> ")[1]]
            cells[key] = max(abs(a - b) / abs(b) for a, b in zip(resumed, straight, strict=True))
    width = max(map(len, names)) + 1
    print(f"{args.precision}, {args.steps} steps after the resume; rows: saved by, columns: resumed by\n")
    print(" " * width + "".join(f"{name:>{width}}" for name in names))
    for saved in names:
        row = [cells[f"{saved} -> {resumed}"] for resumed in names]
        print(f"{saved:<{width}}" + "".join(f"{'=' if cell == 0 else format(cell, '.1e'):>{width}}" for cell in row))
    worst = max(cells, key=lambda key: cells[key])
    unequal = [name for name in names if cells[f"{name} -> {name}"] != 0]
    print(f"\nlargest relative difference: {cells[worst]:.2e} ({worst}); tolerance {args.tolerance:.0e}")
    print(f"same ds_config and world size: {'all bit-equal' if not unequal else f'NOT bit-equal: {unequal}'}")
    save_result(args.json, {"precision": args.precision, "steps": args.steps, "cells": cells})
    return int(cells[worst] > args.tolerance or bool(unequal))


if __name__ == "__main__":
    sys.exit(main())
