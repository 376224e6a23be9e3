"""Compare the estimate of divided sequences and MLPs in tiles with the dry run: bytes at the peak of a step's parts.

    python -m scripts.bench.memory.sequences_grid

Every cell has 15 or 16 ranks and sequences of 8,192 tokens in bf16. Key-value heads are divided, repeated, and repeated
for each query head; groups of 3, 5 and 15 ranks do not divide the tokens. Blocks in no table are recorded first.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.planning.search import Strategy, build_strategy
from scripts.bench.memory.experts_grid import print_grid

#: Preset, ZeRO stage, checkpointing, ranks that divide a sequence, and tokens of a tile.
CELLS: tuple[tuple[str, int, CheckpointingMode, int, int], ...] = (
    ("gpt2-124m", 1, "none", 4, 0),
    ("gpt2-124m", 3, "full", 1, 1000),
    ("smollm2-360m", 3, "selective", 3, 0),
    ("smollm2-360m", 2, "none", 15, 0),
    ("smollm2-360m", 1, "full", 5, 0),
    ("qwen3-0.6b", 3, "full", 16, 0),
    ("qwen3-0.6b", 2, "full", 8, 1024),
    ("llama3-1b", 2, "full", 2, 0),
    ("llama3-1b", 3, "full", 16, 1000),
)


def main() -> None:
    """Print a row for each cell, and the errors of all phases."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print_grid([resolve(*cell) for cell in CELLS])


def resolve(
    preset: str, stage: int, checkpointing: CheckpointingMode, size: int, tile: int
) -> tuple[str, int, ResolvedStep]:
    """Return a cell's name, its ranks of a group, and its step: two micro-steps of one sequence."""
    shape = replace(PRESETS[preset].shape(50_257, 8192), mlp_tile_tokens=tile)
    ranks = ParallelLayout(16 if 16 % size == 0 else 15, size)
    ds = build_strategy(Strategy(stage, "none", "none", checkpointing), "bf16")
    assert ds is not None
    batch = 2 * ranks.data_parallel_size
    plan = build_batch_plan(global_batch_size=batch, ranks=ranks, seq_len=shape.seq_len, micro_batch_size=1)
    return f"{preset}{', tiles' if tile else ''}", size, resolve_step(ds, shape, plan, checkpointing)


if __name__ == "__main__":
    main()
