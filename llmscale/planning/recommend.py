"""Which of the rows that fit to take, and the smallest change that makes one fit that does not. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.memory.format_bytes import format_size
from llmscale.planning.calibration import SMALLEST_MICRO_BATCH_TOKENS
from llmscale.planning.largest_micro_batch import Fit, Job, Machines, Search, fit_at, legal_micro_batches
from llmscale.planning.strategy import CHECKPOINTING, OFFLOADS, STAGES, Strategy, change_strategy, strategy_of

#: Rates closer than this are the same rate: the throughput model is not better than that.
_SAME_RATE = 0.03
#: A row that leaves less of the GPU than this is tight: the estimate may be off by as much.
_TIGHT = 0.05
#: How many times more GPUs are tried when nothing fits.
_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class Recommendation:
    """The row to take."""

    index: int
    why: str
    """One sentence."""


@dataclass(frozen=True)
class Change:
    """A run that fits, and what differs in it from one that does not."""

    fit: Fit
    words: tuple[str, ...]
    """Each thing to change, in the words of flags and ds_configs."""

    def describe(self) -> str:
        return f"{' and '.join(self.words)} ({format_size(self.fit.spare_bytes)} to spare)"


def recommend(fits: Sequence[Fit], tokens_per_second: Sequence[float | None]) -> Recommendation | None:
    """The fastest row that fits; of rows about as fast, the simplest. None when nothing fits.

    `tokens_per_second` is estimated, row by row; None everywhere leaves the simplest.
    """
    fitting = [index for index, fit in enumerate(fits) if fit.fits]
    if not fitting:
        return None
    rates = [tokens_per_second[index] or 0.0 for index in fitting]
    best = max(rates)
    near = [index for index, rate in zip(fitting, rates, strict=True) if rate >= best * (1 - _SAME_RATE)]
    chosen = min(near, key=lambda index: _complexity(fits[index]))
    return Recommendation(chosen, _why(fits[chosen], len(fitting), len(near), known_rate=best > 0))


def _complexity(fit: Fit) -> tuple[int, int, bool, bool, int, int, int, int]:
    """What moves least and computes least comes first, and what is neither tight nor small; then the larger
    micro-batch, then more room."""
    strategy = fit.strategy
    offload = (strategy.offload_optimizer, strategy.offload_param)
    return (
        OFFLOADS.index(offload) if offload in OFFLOADS else len(OFFLOADS),
        CHECKPOINTING.index(strategy.checkpointing),
        fit.spare_bytes < _TIGHT * fit.machines.gpu_bytes,
        fit.plan.micro_batch_size * fit.plan.seq_len < SMALLEST_MICRO_BATCH_TOKENS,
        strategy.zero_stage,
        strategy.zero_hpz_partition_size,
        -fit.plan.micro_batch_size,
        -fit.spare_bytes,
    )


def _why(fit: Fit, num_fitting: int, num_near: int, *, known_rate: bool) -> str:
    spare = f"leaves {format_size(fit.spare_bytes)} of each GPU free"
    if num_fitting == 1:
        return f"the only row that fits; it {spare}."
    if not known_rate:
        return f"the simplest of the {num_fitting} rows that fit: least is moved and recomputed; it {spare}."
    if num_near == 1:
        return f"the fastest of the {num_fitting} rows that fit; it {spare}."
    return (
        f"of the {num_near} fastest rows, equal within {_SAME_RATE:.0%}, the one that moves and recomputes least; "
        f"it {spare}."
    )


def find_smallest_change(
    ds: DsConfig, job: Job, checkpointing: CheckpointingMode, micro_batch_size: int
) -> Change | None:
    """The fewest and cheapest changes that make this run fit the job's machines; None when more GPUs are needed.

    A smaller micro-batch costs least (the loss curve stays as it is), then recomputation, then a higher stage, then
    offload. Raises ConfigError for a run that could not start anyway.
    """
    sizes = [size for size in legal_micro_batches(job) if size <= micro_batch_size][::-1]
    now = strategy_of(ds, checkpointing)
    for size_steps, strategy in _alternatives(len(sizes), now):
        changed = ds if strategy == now else change_strategy(ds, strategy)
        if changed is None:
            continue
        fit = fit_at(_without_batch(changed), job, strategy.checkpointing, sizes[size_steps])
        if fit.fits:
            return Change(fit, tuple(_words(fit, now, micro_batch_size)))
    return None


@dataclass(frozen=True)
class Shortfall:
    """What a search lacks in which nothing fits."""

    nearest: Fit
    """The row that misses least."""
    change: Change | None
    """The cheapest one that makes a row fit, among what the user fixed."""
    more_nodes: tuple[Machines, Fit] | None
    """Without such a change: the fewest nodes, and what fits there; None when no number of them helps."""


def find_shortfall(search: Search, fits: Sequence[Fit]) -> Shortfall:
    """By how much the `fits` of a search miss, and what helps."""
    job, change = search.job, None
    # Where the user fixed something, giving that up may be enough; with all strategies tried, only GPUs are left.
    if search.files or job.micro_batch_size is not None or tuple(search.modes) != CHECKPOINTING:
        change = find_cheapest_change(job, fits)
    return Shortfall(nearest_fit(fits), change, find_enough_nodes(job, fits) if change is None else None)


def find_cheapest_change(job: Job, fits: Sequence[Fit]) -> Change | None:
    """Of all rows that do not fit, the one that the fewest and cheapest changes make fit; None when it takes GPUs."""
    changes = [find_smallest_change(fit.ds, job, fit.strategy.checkpointing, fit.plan.micro_batch_size) for fit in fits]
    found = [change for change in changes if change is not None]
    return min(found, key=lambda change: (len(change.words), _complexity(change.fit)), default=None)


def _alternatives(num_sizes: int, now: Strategy) -> Iterator[tuple[int, Strategy]]:
    """(index into the descending micro-batches, strategy), cheapest first: by the number of things changed, then by
    what they cost."""
    stages = [stage for stage in STAGES if stage >= now.zero_stage]
    modes = CHECKPOINTING[CHECKPOINTING.index(now.checkpointing) :]
    offload_now = (now.offload_optimizer, now.offload_param)
    start = OFFLOADS.index(offload_now) if offload_now in OFFLOADS else None
    # A folder for NVMe is something the user must name, so it is never proposed.
    offloads = [pair for pair in OFFLOADS[start:] if "nvme" not in pair] if start is not None else []
    offloads = offloads or [offload_now]
    groups = sorted({now.zero_hpz_partition_size, 1}, reverse=True)
    choices = itertools.product(range(num_sizes), modes, stages, offloads, groups)

    def cost(choice: tuple[int, CheckpointingMode, int, tuple[str, str], int]) -> tuple[int, ...]:
        size_steps, mode, stage, offload, group = choice
        places = (modes.index(mode), stages.index(stage), offloads.index(offload))  # type: ignore[arg-type]
        levels = (size_steps, *places, groups.index(group))
        return (sum(level > 0 for level in levels), levels[3], levels[2], levels[1], levels[0], levels[4])

    for size_steps, mode, stage, offload, group in sorted(choices, key=cost)[1:]:
        yield size_steps, Strategy(stage, *offload, mode, group)


def _without_batch(ds: DsConfig) -> DsConfig:
    """The same config with its batch sizes open: they follow from the plan."""
    batch = {"train_batch_size": None, "train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}
    return replace(ds, keys=ds.keys.model_copy(update=batch))


def _words(fit: Fit, now: Strategy, micro_batch_size: int) -> Iterator[str]:
    then = fit.strategy
    if fit.plan.micro_batch_size != micro_batch_size:
        yield f"--micro-batch-size {fit.plan.micro_batch_size} instead of {micro_batch_size}"
    if then.checkpointing != now.checkpointing:
        yield f"--activation-checkpointing {then.checkpointing}"
    if then.zero_stage != now.zero_stage:
        yield f"ZeRO stage {then.zero_stage} instead of {now.zero_stage}"
    if then.zero_hpz_partition_size != now.zero_hpz_partition_size:
        yield "no zero_hpz_partition_size"
    if then.offload_optimizer != now.offload_optimizer:
        yield f'offload_optimizer to "{then.offload_optimizer}"'
    if then.offload_param != now.offload_param:
        yield f'offload_param to "{then.offload_param}"'


def find_enough_nodes(job: Job, fits: Sequence[Fit]) -> tuple[Machines, Fit] | None:
    """When none of `fits` fits: the fewest nodes, doubling, on which one of their ds_configs does; None when no number
    of them helps, because what does not shrink with them is too large already."""
    machines = job.machines
    for _ in range(_MOST_DOUBLINGS):
        machines = replace(machines, num_nodes=2 * machines.num_nodes)
        if job.global_batch_size % machines.world_size:
            return None
        more = [fit_at(fit.ds, replace(job, machines=machines), fit.strategy.checkpointing, 1) for fit in fits]
        fitting = [fit for fit in more if fit.fits]
        if fitting:
            return machines, min(fitting, key=_complexity)
    return None


def nearest_fit(fits: Sequence[Fit]) -> Fit:
    """The row that misses least."""
    return max(fits, key=lambda fit: fit.spare_bytes)
