#!/usr/bin/env python3
"""How wrong memory estimates are: llmscale's closed form and three others beside what training really takes.

    python scripts/bench/memory_grid.py --json scripts/bench/results/memory_grid_gpu.json         # on a GPU
    python scripts/bench/memory_grid.py --measure dry-run --json scripts/bench/results/memory_grid_dry_run.json

Trains every cell of a grid (124M to 7B parameters, ZeRO 0-3, offload, activation checkpointing, several micro-batches)
for a few steps in a process of its own and takes the peak of allocated bytes: from CUDA's allocator on one GPU, or
from the dry run (the same engine on tensors without storage, on any machine). A cell that does not fit the GPU is
reported as such. Beside each peak stand the estimates of `llmscale estimate`, of DeepSpeed's own estimator, of the
EleutherAI cookbook's formula and of `accelerate estimate-memory`, and at the end the errors of each over the grid. The
last column is what the caching allocator needs beyond the peak: what it reserved on a GPU, or in a dry run the least
that it can do with by its rules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from children import why_it_failed
from flag_types import output_file
from machine import describe_machine, gpu_names, median_and_range, save_result
from memory_cells import Cell, list_cells

REPOSITORY = Path(__file__).resolve().parents[2]
RANK_PROGRAM = Path(__file__).with_name("memory_grid_rank.py")
ESTIMATORS = ("llmscale", "deepspeed", "cookbook", "accelerate")
GIB = 2**30
Row = dict[str, object]


def main() -> int:
    args = parse_arguments()
    cells = [cell for cell in list_cells() if not args.only or cell.name in args.only]
    machine = describe_machine()
    rows: list[Row] = []
    print(heading())
    for cell in cells:
        rows.append(measure(cell, args.measure, args.timeout_s))
        print(table_line(rows[-1]), flush=True)
        # After every row: a grid takes hours, and what was measured of one that is killed stays.
        errors = {name: summarize_errors(rows, name) for name in ESTIMATORS}
        reserve = summarize_reserve(rows)
        result = {"machine": machine, "measured_by": args.measure, "errors": errors, "reserve": reserve, "rows": rows}
        save_result(args.json, result)
    for name in ESTIMATORS:
        print(summary_line(name, errors[name]))
    print(reserve_line(reserve))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [cell.name for cell in list_cells()]
    parser.add_argument("--measure", choices=("gpu", "dry-run"), default="gpu" if gpu_names() else "dry-run")
    parser.add_argument("--only", nargs="+", metavar="CELL", help=f"these cells alone, of: {', '.join(names)}")
    parser.add_argument("--json", type=output_file, help="write the result to this file")
    parser.add_argument("--timeout-s", type=float, default=900, help="seconds for one cell (%(default)s)")
    args = parser.parse_args()
    if args.measure == "gpu" and not gpu_names():
        parser.error("--measure gpu: this machine has no GPU; --measure dry-run needs none")
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only: no cell is called {name}; --help lists them")
    return args


def measure(cell: Cell, how: str, timeout_s: float) -> Row:
    """One cell in a fresh process: estimates, peak, and why there is no peak where there is none."""
    command = [sys.executable, str(RANK_PROGRAM), how, json.dumps(asdict(cell))]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"cell": cell.name, "problem": f"took longer than {timeout_s:.0f} s"}
    if done.returncode:
        return {"cell": cell.name, "problem": why_it_failed(done)}
    return {"cell": cell.name, **json.loads(done.stdout.splitlines()[-1])}


def relative_error(row: Row, estimator: str) -> float | None:
    """(estimate - peak) / peak; None where the estimator has no answer or the cell no peak."""
    estimates, peak = row.get("estimates"), row.get("peak_bytes")
    if not isinstance(estimates, dict) or not isinstance(peak, int) or estimates.get(estimator) is None:
        return None
    return estimates[estimator] / peak - 1


def summarize_errors(rows: Sequence[Row], estimator: str) -> dict[str, float | int]:
    """Over the cells that the estimator answers: how many, median and largest absolute relative error."""
    errors = [abs(error) for row in rows if (error := relative_error(row, estimator)) is not None]
    if not errors:
        return {"cells": 0}
    within = sum(error <= 0.05 for error in errors)
    return {"cells": len(errors), "within_5_percent": within, **_median_and_worst(errors)}


def relative_reserve(row: Row) -> float | None:
    """What the caching allocator holds beyond the peak, over the peak: on a GPU what it held, in a dry run the least
    that it can do with by its rules."""
    peak, held = row.get("peak_bytes"), row.get("reserved_bytes", row.get("least_gpu_bytes"))
    return held / peak - 1 if isinstance(peak, int) and isinstance(held, int) else None


def summarize_reserve(rows: Sequence[Row]) -> dict[str, float | int]:
    """Over all cells that were measured: how many, median and largest."""
    found = [reserve for row in rows if (reserve := relative_reserve(row)) is not None]
    return {"cells": len(found), **_median_and_worst(found)} if found else {"cells": 0}


def _median_and_worst(values: Sequence[float]) -> dict[str, float]:
    found = median_and_range(values)
    return {"median": found["median"], "least": found["min"], "worst": found["max"]}


def heading() -> str:
    return f"{'cell':44}{'peak GiB':>10}" + "".join(f"{name:>13}" for name in (*ESTIMATORS, "allocator"))


def table_line(row: Row) -> str:
    peak = row.get("peak_bytes")
    if not isinstance(peak, int):
        return f"{row['cell']:44} {row['problem']}"
    errors = [*(relative_error(row, name) for name in ESTIMATORS), relative_reserve(row)]
    shown = "".join(f"{'-' if error is None else f'{error:+.1%}':>13}" for error in errors)
    return f"{row['cell']:44}{peak / GIB:10.2f}{shown}"


def summary_line(name: str, errors: dict[str, float | int]) -> str:
    if not errors["cells"]:
        return f"{name}: no cell"
    return (
        f"{name}: median error {errors['median']:.1%} ({errors['least']:.1%} to {errors['worst']:.1%}), "
        f"{errors['within_5_percent']} of {errors['cells']} cells within 5 %"
    )


def reserve_line(reserve: dict[str, float | int]) -> str:
    if not reserve["cells"]:
        return "allocator: no cell"
    spread = f"{reserve['median']:.1%} ({reserve['least']:.1%} to {reserve['worst']:.1%})"
    return f"allocator: beyond the peak it needs {spread}"


if __name__ == "__main__":
    sys.exit(main())
