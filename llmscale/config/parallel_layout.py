"""ParallelLayout: which ranks share what. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmscale.errors import ConfigError


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def sequence_parallel_sizes(world_size: int, n_head: int) -> list[int]:
    """Return the numbers of ranks that can divide a sequence: divisors of the ranks and of the query heads."""
    return divisors(math.gcd(world_size, n_head))


@dataclass(frozen=True)
class ParallelLayout:
    """All ranks of a run, and the groups that they form; one GPU, or one CPU process, each.

    Neighbouring ranks divide the tokens of the same sequences, and so are one data-parallel rank together. ZeRO divides
    model states over all of them, as none holds other weights than the next. Neighbours may also divide the experts of
    a mixture: ZeRO then divides the states of a rank's experts over the ranks that hold the same ones.
    """

    world_size: int
    """All ranks. ZeRO divides all model states over them, except those of divided experts."""
    sequence_parallel_size: int = 1
    """Ranks that divide a sequence."""
    expert_parallel_size: int = 1
    """Ranks that divide the experts of a block."""

    def __post_init__(self) -> None:
        for name, what in (("sequence_parallel_size", "a sequence"), ("expert_parallel_size", "experts")):
            size = getattr(self, name)
            if size < 1 or self.world_size % size:
                legal = ", ".join(str(legal) for legal in divisors(self.world_size) if legal <= 64)
                raise ConfigError(
                    f"{self.world_size} ranks cannot be divided into groups of {size} that share {what}: the size of a "
                    f"group must divide the number of ranks. Legal --{name.replace('_', '-')}: {legal}."
                )

    @property
    def data_parallel_size(self) -> int:
        """Parts of a global batch: groups of ranks that train on samples of their own."""
        return self.world_size // self.sequence_parallel_size

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks that hold the same experts, over which ZeRO divides the experts' states and reduces gradients."""
        return self.world_size // self.expert_parallel_size

    def group_of(self, rank: int) -> int:
        """Return the number of a rank's group, which is its data-parallel rank."""
        return rank // self.sequence_parallel_size

    def is_first(self, rank: int) -> bool:
        """Return whether a rank answers for the samples of its group."""
        return rank % self.sequence_parallel_size == 0

    def groups_per_node(self, ranks_per_node: Sequence[int]) -> tuple[int, ...]:
        """Return the groups that begin on each node, without nodes where none does."""
        size, end, groups = self.sequence_parallel_size, 0, []
        for ranks in ranks_per_node:
            begin, end = end, end + ranks
            groups.append(-(-end // size) - -(-begin // size))
        return tuple(count for count in groups if count)

    def part_of(self, seq_len: int) -> int:
        """Return a rank's tokens of a sequence; the last ranks may have fewer."""
        return -(-seq_len // self.sequence_parallel_size)

    def heads_of_rank(self, n_head: int, n_kv_head: int) -> tuple[int, int]:
        """Return the query and key-value heads in a rank's attention. Raises ConfigError.

        Key-value heads that cannot be divided are repeated before, as often as needed.
        """
        size = self.sequence_parallel_size
        if n_head % size:
            legal = map(str, sequence_parallel_sizes(self.world_size, n_head))
            raise ConfigError(
                f"sequence_parallel_size {size} does not divide the {n_head} query heads: attention gives every rank "
                f"of a group as many. Legal for this model on {self.world_size} ranks: {', '.join(legal)}."
            )
        return n_head // size, math.lcm(n_kv_head, size) // size

    def experts_of_rank(self, num_experts: int) -> int:
        """Return the experts of each block that a rank holds. Raises ConfigError."""
        size = self.expert_parallel_size
        if size > 1 and not num_experts:
            raise ConfigError(
                f"expert_parallel_size {size} has no effect on a model without experts. Drop --expert-parallel-size, "
                "or give --num-experts."
            )
        if num_experts % size:
            legal = map(str, divisors(math.gcd(self.world_size, num_experts)))
            raise ConfigError(
                f"expert_parallel_size {size} does not divide the {num_experts} experts: every rank of a group holds "
                f"as many. Legal for this model on {self.world_size} ranks: {', '.join(legal)}."
            )
        return num_experts // size

    def describe_split(self, seq_len: int, n_head: int, n_kv_head: int) -> str:
        """Return which tokens and heads of a sequence a rank has."""
        heads, kv_heads = self.heads_of_rank(n_head, n_kv_head)
        sent = kv_heads * self.sequence_parallel_size
        repeated = f" ({n_kv_head} repeated to {sent})" if sent != n_kv_head else ""
        return (
            f"{self.sequence_parallel_size} ranks divide a sequence: {self.part_of(seq_len):,} of {seq_len:,} tokens "
            f"each, in attention all tokens and {heads} of {n_head} query heads, {kv_heads} of {sent} key-value "
            f"heads{repeated}"
        )
