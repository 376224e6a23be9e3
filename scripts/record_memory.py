"""Record the activation memory of llmscale's model in every branch of its code, for llmscale.memory.activations.

python scripts/record_memory.py [TABLE ...]

Run it after a change in llmscale/model/, or for other versions of torch or DeepSpeed than the tables name. TABLE: only
these, such as `ends` after a change in the output head or the loss.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import time
import warnings

import deepspeed
import torch

from llmscale.dry_run.gpt_recording import all_block_branches, all_ends_branches, record_branch
from llmscale.dry_run.recording import pack_branches
from llmscale.memory.activations.recorded import TABLES, RecordedSegment, table_of
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch


def main() -> None:
    """Record on all cores, and replace the tables."""
    began = time.perf_counter()
    branches = [*all_block_branches(), *all_ends_branches()]
    names = {table_of(branch) for branch in branches}
    parser = argparse.ArgumentParser(description="Record activation memory.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables to record; default: all")
    wanted = set(parser.parse_args().tables) or names
    if unknown := sorted(wanted - names):
        parser.error(f"{unknown[0]} is not a table. Legal: {', '.join(sorted(names))}")
    branches = [branch for branch in branches if table_of(branch) in wanted]
    found: dict[str, dict[str, dict[str, RecordedSegment]]] = {}
    # spawn: a dry run must not inherit the patches that an earlier one made in DeepSpeed.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), prepare) as pool:
        for done, (branch, segments) in enumerate(pool.imap(record, branches, chunksize=8), 1):
            found.setdefault(table_of(branch), {})[branch.key] = segments
            if done % 64 == 0:
                print(f"{done} of {len(branches)} branches, {time.perf_counter() - began:.0f} s", flush=True)
    for name, recorded in found.items():
        write_table(name, {"torch": torch.__version__, "deepspeed": deepspeed.__version__, **pack_branches(recorded)})
    for path in TABLES.glob("*.json"):
        if path.stem not in names:
            path.unlink()
    size = sum(path.stat().st_size for path in TABLES.glob("*.json"))
    print(f"{TABLES}: {len(branches)} branches in {len(found)} tables, {size:,} bytes")


def prepare() -> None:
    """Exclude the libraries' objects from garbage collection, which every trace runs."""
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()


def record(branch: BlockBranch | EndsBranch) -> tuple[BlockBranch | EndsBranch, dict[str, RecordedSegment]]:
    """Record one branch in a process of the pool."""
    return branch, record_branch(branch)


def write_table(name: str, table: dict[str, object]) -> None:
    """Write a table with one entry per line, so that diffs are readable."""
    lines = []
    for entry, value in table.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            lines.append(f'"{entry}": [\n{rows}\n]')
        elif isinstance(value, dict):
            rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            lines.append(f'"{entry}": {{\n{rows}\n}}')
        else:
            lines.append(f'"{entry}": {json.dumps(value)}')
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
