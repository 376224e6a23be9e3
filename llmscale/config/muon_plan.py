"""Divide Muon's matrices among the ranks, and count the FLOPs of their orthogonalisation. No torch.

ZeRO shards Muon's momentum like any other state, but only a complete matrix can be orthogonalised. `plan_rounds`
decides which rank gathers which sharded matrix. `llmscale.engine.optimizers` follows that plan; memory and speed derive
from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Steps of the Newton-Schulz iteration (Jordan et al. 2024).
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Part:
    """Range of elements of a flattened tensor that one rank holds."""

    rank: int
    start: int
    length: int


@dataclass(frozen=True)
class Matrix:
    """Matrix that Muon orthogonalises."""

    rows: int
    columns: int
    parts: tuple[Part, ...]
    """Ranges in the order of the elements; empty if every rank holds the complete matrix."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def is_cut(self) -> bool:
        """Return whether no rank holds the complete matrix."""
        return len(self.parts) > 1

    @property
    def newton_schulz_flops(self) -> int:
        """FLOPs of the iteration: in each step X X^T, its square, and the product of that with X."""
        smaller, larger = sorted((self.rows, self.columns))
        return NEWTON_SCHULZ_STEPS * (2 * 2 * smaller**2 * larger + 2 * smaller**3)

    def part_of(self, rank: int) -> Part | None:
        """Return the range that `rank` holds, or None."""
        return next((part for part in self.parts if part.rank == rank), None)


def matrices_of(row_blocks: Sequence[int], columns: int, parts: Sequence[Part]) -> Iterator[tuple[int, Matrix]]:
    """Yield the matrices stacked in a parameter, each with its first element in the parameter.

    row_blocks: rows of each matrix; parts: ranges of the parameter.
    """
    begin = 0
    for rows in row_blocks:
        end = begin + rows * columns
        own = (
            Part(part.rank, max(part.start, begin) - begin, min(part.start + part.length, end) - max(part.start, begin))
            for part in parts
        )
        yield begin, Matrix(rows, columns, tuple(part for part in own if part.length > 0))
        begin = end


def plan_rounds(matrices: Sequence[Matrix]) -> list[dict[int, int]]:
    """Return, for each round, the index in `matrices` that each rank gathers. All `matrices` are sharded.

    In a round a rank gathers at most one matrix, of which it holds a part. The largest come first, so that the matrices
    of a round take about equally long.
    """
    taken: Counter[int] = Counter()
    rounds: list[dict[int, int]] = []
    for index in sorted(range(len(matrices)), key=lambda index: -matrices[index].newton_schulz_flops):
        owner = min((part.rank for part in matrices[index].parts), key=lambda rank: (taken[rank], rank))
        if taken[owner] == len(rounds):
            rounds.append({})
        rounds[taken[owner]][owner] = index
        taken[owner] += 1
    return rounds
