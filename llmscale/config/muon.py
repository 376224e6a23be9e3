"""How the ranks share Muon's work: which matrices there are, who orthogonalises which, and what that takes. No torch.

Muon's momentum is cut as ZeRO cuts everything else, and a matrix can only be orthogonalised as a whole. `plan_rounds`
says who brings together what was cut; `llmscale.engine.optimizers` does it, and memory and speed derive from the
same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Steps of the Newton-Schulz iteration (Jordan et al. 2024).
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Part:
    """Neighbouring elements of a flattened tensor that one rank has."""

    rank: int
    start: int
    length: int


@dataclass(frozen=True)
class Matrix:
    """What is orthogonalised as a whole."""

    rows: int
    columns: int
    parts: tuple[Part, ...]
    """Who has what of it, in the order of its elements; empty: every rank has all of it."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def is_cut(self) -> bool:
        """Whether no rank has all of it."""
        return len(self.parts) > 1

    @property
    def newton_schulz_flops(self) -> int:
        """In each step X X^T, its square, and the product of that with X."""
        smaller, larger = sorted((self.rows, self.columns))
        return NEWTON_SCHULZ_STEPS * (2 * 2 * smaller**2 * larger + 2 * smaller**3)

    def part_of(self, rank: int) -> Part | None:
        """None where a rank has nothing of it."""
        return next((part for part in self.parts if part.rank == rank), None)


def matrices_of(row_blocks: Sequence[int], columns: int, parts: Sequence[Part]) -> Iterator[tuple[int, Matrix]]:
    """A parameter's matrices, one below the other, each with its first element in the parameter.

    row_blocks: rows of each; parts: of the parameter.
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
    """Round by round, rank -> place in `matrices` of the one that it brings together; all of them are cut.

    One matrix per rank and round, by a rank that has a part of it; the largest first, so that those of a round take
    about as long.
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
