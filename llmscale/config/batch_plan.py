"""Divide a global batch over any number of ranks, and micro-steps. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from llmscale.errors import ConfigError

#: Most tokens per forward pass of a default micro-batch: enough to fill a data-centre GPU for models up to about 1B
#: parameters. `--micro-batch-size` overrides it.
DEFAULT_MICRO_BATCH_TOKENS = 16_384
#: Share of fillers that is not worth a word.
_FEW_FILLERS = 0.02
#: Most numbers that an error lists.
_MOST_LISTED = 24
#: Most sizes of a growing batch; a checkpoint lists them.
_MOST_SIZES = 1024
#: Most lengths of growing sequences: torch.compile keeps as many graphs of a block.
_MOST_LENGTHS = 8
#: Batch sizes of a run, ascending: steps done, samples seen, and the size from there on.
Batches = tuple[tuple[int, int, int], ...]


def samples_after(batches: Batches, steps: int) -> int:
    """Return the samples seen after `steps` steps."""
    done, seen, size = next(known for known in reversed(batches) if known[0] <= steps)
    return seen + (steps - done) * size


@dataclass(frozen=True)
class BatchRamp:
    """Growth of the global batch at the beginning of a run, linear in the samples seen (Brown et al. 2020, table 2.1
    and appendix B)."""

    first: int
    """Sequences of the first step; later sizes are multiples, rounded down."""
    samples: int
    """Samples after which the batch has its full size."""

    def size(self, full: int, seen: int) -> int:
        """Return the sequences of the step after `seen` samples."""
        grown = self.first + (full - self.first) * min(seen, self.samples) // self.samples
        return grown // self.first * self.first


@dataclass(frozen=True)
class LengthRamp:
    """Growth of the sequences at the beginning of a run: each length is twice the one before, for as many tokens.

    A sample of the dataset is cut into sequences, so that a step has the same samples and tokens at every length (Jin
    et al. 2023, "GrowLength").
    """

    first: int
    """Tokens of the first sequences: those of a sample, halved some times."""
    samples: int
    """Samples after which sequences are complete."""

    def length(self, full: int, seen: int) -> int:
        """Return the tokens of a sequence after `seen` samples."""
        doublings = (full // self.first).bit_length() - 1
        return self.first << min(doublings, doublings * seen // self.samples)


@dataclass(frozen=True)
class BatchPlan:
    """Division of a global batch into micro-batches, of which any number of ranks gets a share.

    All ranks run as many micro-steps, because ZeRO and divided experts need every rank. A rank without a micro-batch
    runs a filler: a micro-batch whose loss has weight zero.
    """

    global_batch_size: int
    """Sequences per optimizer step over all ranks, after a ramp; fixed for a run, whatever the number of ranks."""
    micro_batch_size: int
    """Sequences per forward pass of a rank, or of the ranks that divide them."""
    gradient_accumulation_steps: int
    """Forward passes per rank and optimizer step."""
    ranks: ParallelLayout
    seq_len: int
    """Tokens per sequence."""
    ramp: BatchRamp | None = None
    """Growth of the batch from the beginning of the run; None for a constant batch."""
    lengths: LengthRamp | None = None
    """Growth of the sequences from the beginning of the run; None for constant ones."""

    @property
    def samples_per_step(self) -> int | str:
        """Sequences of a step, and how a ramp leads there: what a checkpoint and its run must share."""
        if self.ramp is None:
            return self.global_batch_size
        return f"{self.global_batch_size}, from {self.ramp.first} over {self.ramp.samples} samples"

    def length_after(self, samples: int) -> int:
        """Return the tokens of a sequence in the step after `samples` samples."""
        if self.lengths:
            return self.lengths.length(self.seq_len, samples)
        return self.seq_len

    def batches_from(self, step: int, seen: int) -> Batches:
        """Return the batch sizes from a step on, after `seen` samples."""
        full = self.global_batch_size
        ramp = self.ramp
        if ramp is None:
            return ((step, seen, full),)
        batches = [(step, seen, ramp.size(full, seen))]
        while (size := batches[-1][-1]) < full:
            # The batch grows by another `first` once this many samples are seen.
            until = -(-size * ramp.samples // (full - ramp.first))
            steps = -(-(until - seen) // size)
            step = step + steps
            seen = seen + steps * size
            batches.append((step, seen, ramp.size(full, seen)))
        return tuple(batches)

    @cached_property
    def _batches(self) -> Batches:
        return self.batches_from(0, 0)

    def samples_after(self, steps: int) -> int:
        """Return the samples that a run has seen after `steps` steps."""
        return samples_after(self._batches, steps)

    def steps_for(self, samples: int) -> int:
        """Return the fewest steps that see `samples` samples."""
        done, seen, size = next(known for known in reversed(self._batches) if known[1] < max(1, samples))
        return done - (seen - samples) // size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, after a ramp."""
        return self.global_batch_size * self.seq_len

    @property
    def tokens_per_forward(self) -> int:
        """Tokens of a rank's forward pass."""
        return self.micro_batch_size * self.ranks.part_of(self.seq_len)

    def micro_steps(self, size: int) -> int:
        """Return the forward passes of a rank in a step of `size` sequences."""
        return -(-size // (self.micro_batch_size * self.ranks.data_parallel_size))

    def computed(self, size: int) -> int:
        """Return the sequences that the ranks compute in a step of `size`, those of fillers included."""
        return self.micro_batch_size * self.micro_steps(size) * self.ranks.data_parallel_size

    def loss_weight(self, size: int) -> float:
        """Return the weight of a micro-batch in a step of `size` sequences: DeepSpeed's mean is over fillers, too."""
        return self.computed(size) / size

    @property
    def train_batch_size(self) -> int:
        """DeepSpeed's number of samples: with fillers, and a sequence once for every rank that has a part of it."""
        return self.computed(self.global_batch_size) * self.ranks.sequence_parallel_size

    @property
    def filler_share(self) -> float:
        """Work of fillers in a step, relative to that of the batch."""
        return self.loss_weight(self.global_batch_size) - 1

    def with_fewest_fillers(self) -> BatchPlan | None:
        """Return the plan with the largest micro-batch that needs the fewest fillers; None if this one does."""
        groups = self.ranks.data_parallel_size
        first = self.ramp.first if self.ramp else self.global_batch_size
        sizes = [size for size in cheapest_micro_batches(self.global_batch_size, groups) if first % size == 0]
        if self.micro_batch_size in sizes:
            return None
        plan = replace(self, micro_batch_size=sizes[-1])
        return replace(plan, gradient_accumulation_steps=plan.micro_steps(self.global_batch_size))

    def as_dict(self) -> dict[str, int]:
        """Return JSON values for the run folder."""
        return {
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "world_size": self.ranks.world_size,
            "sequence_parallel_size": self.ranks.sequence_parallel_size,
            "expert_parallel_size": self.ranks.expert_parallel_size,
            "seq_len": self.seq_len,
        }

    def describe(self) -> str:
        """Return the multiplication in one line."""
        grows = ""
        if self.ramp is not None:
            steps, _, _ = self._batches[-1]
            grows = f", grown from {self.ramp.first} sequences in {len(self._batches)} sizes by step {steps + 1:,}"
        if self.lengths is not None:
            grows += f", cut into sequences of {self.lengths.first} to {self.seq_len // 2} tokens until step "
            grows += f"{self.steps_for(self.lengths.samples):,}"
        return (
            f"global batch {self.global_batch_size} sequences = {self.micro_batch_size} micro-batch "
            f"x {self.gradient_accumulation_steps} accumulation x {_count_groups(self.ranks)}"
            f"{self._describe_fillers()} = {self.tokens_per_step:,} tokens per step{grows}"
        )

    def _describe_fillers(self) -> str:
        fillers = (self.computed(self.global_batch_size) - self.global_batch_size) // self.micro_batch_size
        if not fillers:
            return ""
        if self.filler_share > _FEW_FILLERS:
            work = f" ({self.filler_share:.0%} more work)"
        else:
            work = ""
        return f" - {fillers} filler{'s' * (fillers > 1)}{work}"


def build_batch_plan(
    *,
    global_batch_size: int,
    ranks: ParallelLayout,
    seq_len: int,
    micro_batch_size: int | None = None,
    ramp: BatchRamp | None = None,
    lengths: LengthRamp | None = None,
) -> BatchPlan:
    """Divide `global_batch_size` sequences over the data-parallel ranks.

    The micro-batch must divide it, and with a ramp its first size. The default needs the fewest fillers, and is the
    largest such one within DEFAULT_MICRO_BATCH_TOKENS. Raises ConfigError for a micro-batch that does not divide the
    batch, and for more ranks than sequences.
    """
    if global_batch_size < 1:
        raise ConfigError(f"global_batch_size must be at least 1 sequence, not {global_batch_size}.")
    if lengths is not None:
        _check_lengths(lengths, seq_len)
    groups = ranks.data_parallel_size
    smallest = global_batch_size
    key = "global_batch_size"
    if groups > global_batch_size:
        raise ConfigError(
            f"global_batch_size {global_batch_size} has fewer sequences than there are ranks to train on them: "
            f"{_count_groups(ranks)}. Use at most {global_batch_size * ranks.sequence_parallel_size} ranks, or give "
            f"--global-batch-size {groups} or more."
        )
    if ramp is not None:
        _check_ramp(ramp, global_batch_size)
        smallest = ramp.first
        key = "batch_ramp_from"
    legal = divisors(smallest)
    if micro_batch_size is None:
        sizes = set(cheapest_micro_batches(global_batch_size, groups)).intersection(legal)
        if groups <= smallest:
            sizes.intersection_update(cheapest_micro_batches(smallest, groups))
        micro_batch_size = max(
            (s for s in sizes if s * ranks.part_of(seq_len) <= DEFAULT_MICRO_BATCH_TOKENS), default=1
        )
    if micro_batch_size not in legal:
        raise ConfigError(
            f"micro_batch_size {micro_batch_size} does not divide {key} {smallest}. "
            f"Legal micro-batches: {_listed(legal)}."
        )
    micro_steps = -(-global_batch_size // (groups * micro_batch_size))
    return BatchPlan(global_batch_size, micro_batch_size, micro_steps, ranks, seq_len, ramp, lengths)


def cheapest_micro_batches(batch: int, groups: int) -> list[int]:
    """Return the ascending micro-batches that divide a batch and need the fewest fillers on `groups` of ranks."""
    share = -(-batch // groups)
    return [size for size in divisors(batch) if -(-batch // (size * groups)) * size == share]


def _check_ramp(ramp: BatchRamp, full: int) -> None:
    """Raise ConfigError unless a batch can grow from the ramp's first size to the full one."""
    legal = [number for number in divisors(full)[:-1] if full // number <= _MOST_SIZES]
    if ramp.first not in legal:
        raise ConfigError(
            f"batch_ramp_from {ramp.first} must divide the global batch of {full} sequences, in 2 to {_MOST_SIZES} "
            f"parts: the batch grows by as many. Legal: {_listed(legal) or 'none, for a batch of one sequence'}."
        )


def _check_lengths(lengths: LengthRamp, full: int) -> None:
    """Raise ConfigError unless sequences become complete by doubling."""
    legal = [full >> halvings for halvings in range(_MOST_LENGTHS - 1, 0, -1) if full % (1 << halvings) == 0]
    if lengths.first not in legal:
        raise ConfigError(
            f"seq_len_ramp_from {lengths.first} must be the dataset's {full} tokens halved 1 to {_MOST_LENGTHS - 1} "
            f"times: each length is twice the one before. Legal: {_listed(legal) or 'none, for an odd number'}."
        )


def _count_groups(ranks: ParallelLayout) -> str:
    size = ranks.sequence_parallel_size
    groups = ranks.data_parallel_size
    if size > 1:
        return f"{groups} group{'s' * (groups > 1)} of {size} ranks"
    return f"{ranks.world_size} ranks"


def _listed(numbers: list[int]) -> str:
    first = ", ".join(map(str, numbers[:_MOST_LISTED]))
    return f"{first}, ... {numbers[-1]}" if len(numbers) > _MOST_LISTED else first


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
        size = self.sequence_parallel_size
        end = 0
        groups = []
        for ranks in ranks_per_node:
            begin = end
            end = end + ranks
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
