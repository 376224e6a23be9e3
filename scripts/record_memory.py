"""Records the activation memory of llmscale's model in every branch of its code, for llmscale.memory.activations.

python scripts/record_memory.py

Run it after a change in llmscale/model/, or for another torch or DeepSpeed than the table names.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings

import deepspeed
import torch

from llmscale.dry_run.factor import pack_branches
from llmscale.dry_run.fake_world import fake_world
from llmscale.dry_run.gpt_recording import all_block_branches, all_ends_branches, record_blocks, record_ends
from llmscale.memory.activations.recorded import TABLE_PATH, RecordedSegment
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch


def main() -> None:
    """Record everything, on all cores, and replace the table."""
    began = time.perf_counter()
    branches = [*all_block_branches(), *all_ends_branches()]
    found: dict[type, dict[str, dict[str, RecordedSegment]]] = {BlockBranch: {}, EndsBranch: {}}
    # spawn: what a dry run patches in DeepSpeed must not be inherited by the next one.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for done, (branch, segments) in enumerate(pool.imap(record, branches, chunksize=8), 1):
            found[type(branch)][branch.key] = segments
            if done % 64 == 0:
                print(f"{done} of {len(branches)} branches, {time.perf_counter() - began:.0f} s", flush=True)
    table = pack_branches(found[BlockBranch], found[EndsBranch])
    write_table({"torch": torch.__version__, "deepspeed": deepspeed.__version__, **table})
    print(f"{TABLE_PATH}: {len(branches)} branches, {TABLE_PATH.stat().st_size:,} bytes")


def record(branch: BlockBranch | EndsBranch) -> tuple[BlockBranch | EndsBranch, dict[str, RecordedSegment]]:
    """One branch, in a process of the pool."""
    warnings.simplefilter("ignore")
    with fake_world(1):
        return branch, record_blocks(branch) if isinstance(branch, BlockBranch) else record_ends(branch)


def write_table(table: dict[str, object]) -> None:
    """One entry a line, so that a change shows as what it is."""
    lines = []
    for name, value in table.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            lines.append(f'"{name}": [\n{rows}\n]')
        elif isinstance(value, dict):
            rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            lines.append(f'"{name}": {{\n{rows}\n}}')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    TABLE_PATH.parent.mkdir(exist_ok=True)
    TABLE_PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
