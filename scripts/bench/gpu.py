#!/usr/bin/env python3
"""Everything that only a GPU can show, in one command of under 25 minutes: speed, memory, and how good estimates are.

    scripts/bench/gpu.sh                        # installs, then runs this; what follows goes to it
    scripts/bench/gpu.sh --nanogpt ../nanoGPT   # without, it is cloned from GitHub
    python scripts/bench/gpu.py --device cpu    # tiny models: shows that it works, and no speed

On one GPU: GPT-2 124M to 1.5B, Llama 3's 1B and 8B, ZeRO 0-3, offload, compiled and eager; nanoGPT's own train.py with
the same micro-batch and step, in turns with ours; cells of memory_grid.py. Every cell is a process of its own: train.py
itself, from its command line, ended when it has been watched for long enough; what is printed of it is the median over
its steps after the first three. A cell that fails is a line of the table. Cells come in the order of what they are
worth, and what is not begun for want of time is said.

After every cell the result files are written anew: gpu_NAME.json, .txt, .md (the README's table) and .patch, which
gives constants that the estimates assume the values that were measured; to be read, and applied with `git apply`.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from pathlib import Path

from gpu_cells import list_cpu_cells, list_gpu_cells
from gpu_report import heading, replace_table
from machine import describe_machine
from paced_ranks import REPOSITORY

sys.path.insert(0, str(REPOSITORY))


def main() -> int:
    args = parse_arguments()
    from gpu_bench import Bench, describe_cell
    from gpu_device import find_device
    from gpu_nanogpt import find_nanogpt

    # A stop from outside is one from the keyboard: cells end, what was measured stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    device = find_device(args.device)
    cells = list_gpu_cells() if device.kind == "cuda" else list_cpu_cells()
    cells = [cell for cell in cells if not args.only or any(words in cell.name for words in args.only)]
    if not cells:
        print(f"--only {' '.join(args.only)}: no cell of {args.device} has these words in its name", file=sys.stderr)
        return 2
    print(f"{device.name}: {len(cells)} cells, {args.minutes:g} minutes, {args.spent_s:.0f} s of them gone", flush=True)
    status = 0
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as scratch:
        folder = Path(scratch)
        deadline = began + 60 * args.minutes - args.spent_s
        machine = describe_machine()
        bench = Bench(args, device, folder, deadline, machine, find_nanogpt(args.nanogpt, device.kind, folder))
        print(heading(), flush=True)
        try:
            bench.run_all(cells)
        except KeyboardInterrupt:
            status = 130
            bench.rows += [{**describe_cell(cell), "problem": "stopped before it"} for cell in cells[len(bench.rows) :]]
            bench.save()
    print("\n".join(bench.closing()))
    if args.out:
        print(f"written: {', '.join(map(str, sorted(args.out.glob(f'gpu_{device.label}.*'))))}")
    return status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--minutes", type=float, default=25, help="for everything (default: 25)")
    parser.add_argument(
        "--measure-s", type=float, help="seconds of steps that are counted per cell (default: 15; 1 on a CPU)"
    )
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cells whose name has these words")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="of the result files (default: scripts/bench/results; on a CPU none)")  # fmt: skip
    parser.add_argument("--write-readme", action="store_true", help="put the table between its markers in README.md")
    parser.add_argument("--spent-s", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_s is None:
        args.measure_s = 15 if args.device == "cuda" else 1
    if args.out is None and args.device == "cuda":
        args.out = REPOSITORY / "scripts" / "bench" / "results"
    if args.out and not args.out.is_dir():
        parser.error(f"--out {args.out} is no folder")
    if not (0 < args.minutes < math.inf and 0 < args.measure_s < math.inf):
        parser.error("--minutes and --measure-s must be above 0, and finite")
    if args.nanogpt and not (args.nanogpt / "train.py").is_file():
        parser.error(f"--nanogpt {args.nanogpt} has no train.py; git clone https://github.com/karpathy/nanoGPT")
    if args.write_readme and args.device == "cpu":
        parser.error("--write-readme is for what a GPU measured")
    if args.write_readme:
        try:
            replace_table((REPOSITORY / "README.md").read_text(), "")
        except ValueError as error:
            parser.error(f"--write-readme: README.md: {error}")
    return args


if __name__ == "__main__":
    sys.exit(main())
