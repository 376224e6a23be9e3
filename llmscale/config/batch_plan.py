"""Divide a global batch over ranks and micro-steps. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.config.parallel_layout import ParallelLayout
from llmscale.errors import ConfigError

#: Most tokens per forward pass of a default micro-batch: enough to fill a data-centre GPU for models up to about 1B
#: parameters. `--micro-batch-size` overrides it.
DEFAULT_MICRO_BATCH_TOKENS = 16_384
#: Most numbers that an error lists.
_MOST_LISTED = 24


@dataclass(frozen=True)
class BatchPlan:
    """Division of a global batch: micro_batch_size x gradient_accumulation_steps x data_parallel_size, exactly."""

    global_batch_size: int
    """Sequences per optimizer step over all ranks; fixed for a run, whatever the number of ranks."""
    micro_batch_size: int
    """Sequences per forward pass of a rank, or of the ranks that divide them."""
    gradient_accumulation_steps: int
    """Forward passes per rank and optimizer step."""
    ranks: ParallelLayout
    seq_len: int
    """Tokens per sequence."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def samples_per_rank(self) -> int:
        """Sequences of one optimizer step on one rank."""
        return self.global_batch_size // self.ranks.data_parallel_size

    def as_dict(self) -> dict[str, int]:
        """Return JSON values for the run folder."""
        return {
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "world_size": self.ranks.world_size,
            "sequence_parallel_size": self.ranks.sequence_parallel_size,
            "seq_len": self.seq_len,
        }

    def describe(self) -> str:
        """Return the multiplication in one line."""
        return (
            f"global batch {self.global_batch_size} sequences = {self.micro_batch_size} micro-batch "
            f"x {self.gradient_accumulation_steps} accumulation x {_count_groups(self.ranks)} "
            f"= {self.tokens_per_step:,} tokens per step"
        )


def build_batch_plan(
    *, global_batch_size: int, ranks: ParallelLayout, seq_len: int, micro_batch_size: int | None = None
) -> BatchPlan:
    """Divide `global_batch_size` sequences over the data-parallel ranks.

    The micro-batch defaults to the largest divisor of a rank's share that stays within DEFAULT_MICRO_BATCH_TOKENS.
    Raises ConfigError that lists the legal world sizes and micro-batches when the division leaves a remainder.
    """
    if global_batch_size < 1:
        raise ConfigError(f"global_batch_size must be at least 1 sequence, not {global_batch_size}.")
    size = ranks.data_parallel_size
    if global_batch_size % size:
        legal_sizes = [parts * ranks.sequence_parallel_size for parts in divisors(global_batch_size)]
        raise ConfigError(
            f"global_batch_size {global_batch_size} cannot be divided over {_count_groups(ranks)}. "
            f"Legal world sizes for it: {_listed(legal_sizes)}. "
            f"Or change --global-batch-size to {_nearest_multiples(global_batch_size, size)}."
        )
    share = global_batch_size // size
    legal = divisors(share)
    if micro_batch_size is None:
        fitting = [size for size in legal if size * ranks.part_of(seq_len) <= DEFAULT_MICRO_BATCH_TOKENS]
        micro_batch_size = max(fitting, default=1)
    if micro_batch_size < 1 or share % micro_batch_size:
        raise ConfigError(
            f"micro_batch_size {micro_batch_size} does not divide the {share} sequences that each of "
            f"{_count_groups(ranks)} has per step (global_batch_size {global_batch_size}). Legal micro-batches: "
            f"{_listed(legal)}."
        )
    return BatchPlan(global_batch_size, micro_batch_size, share // micro_batch_size, ranks, seq_len)


def _count_groups(ranks: ParallelLayout) -> str:
    size, groups = ranks.sequence_parallel_size, ranks.data_parallel_size
    return f"{groups} group{'s' * (groups > 1)} of {size} ranks" if size > 1 else f"{ranks.world_size} ranks"


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    return f"{shown}, ... {numbers[-1]}" if len(numbers) > _MOST_LISTED else shown


def _nearest_multiples(number: int, factor: int) -> str:
    below, above = number // factor * factor, -(-number // factor) * factor
    return f"{below} or {above}" if below else str(above)
