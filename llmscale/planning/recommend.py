"""The rows of `llmscale estimate` with their speed, the row to take, and changes that make a run fit. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmscale.config.deepspeed.resolve import BATCH_KEYS, DsConfig
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import INTERCONNECTS, Cluster, Interconnect
from llmscale.config.presets import PRESETS
from llmscale.memory.breakdown import format_size
from llmscale.planning.calibration import SMALLEST_MICRO_BATCH_TOKENS
from llmscale.planning.kernels import KernelSettings
from llmscale.planning.search import (
    CHECKPOINTING,
    MARGIN,
    OFFLOADS,
    STAGES,
    Candidate,
    Job,
    Machines,
    Search,
    Strategy,
    build_strategy,
    change_strategy,
    cheapest_sizes,
    find_fits,
    fit_at,
    strategy_of,
)
from llmscale.planning.step_time import Throughput, estimate_step

#: Relative difference below which two rates count as equal, given the accuracy of the model.
_SAME_RATE = 0.03
#: Doublings of the nodes to try when nothing fits.
_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class Recommendation:
    """Row to take."""

    index: int
    why: str
    """Reason, one sentence."""


@dataclass(frozen=True)
class Change:
    """A run that fits, and its differences from one that does not."""

    fit: Candidate
    words: tuple[str, ...]
    """Changes, as flags and ds_config keys."""

    def describe(self) -> str:
        return f"{' and '.join(self.words)} ({format_size(self.fit.spare_bytes)} to spare)"


def recommend(fits: Sequence[Candidate], tokens_per_second: Sequence[float | None]) -> Recommendation | None:
    """Return the fastest row that fits; of rows about as fast, the simplest. None if nothing fits.

    Rows without MARGIN are taken only where no row has it.
    `tokens_per_second`: estimated rate of each row; without any rate the simplest row is taken.
    """
    with_margin = [index for index, fit in enumerate(fits) if fit.has_margin]
    fitting = with_margin or [index for index, fit in enumerate(fits) if fit.fits]
    if not fitting:
        return None
    rates = [tokens_per_second[index] or 0.0 for index in fitting]
    best = max(rates)
    near = [index for index, rate in zip(fitting, rates, strict=True) if rate >= best * (1 - _SAME_RATE)]
    chosen = min(near, key=lambda index: _complexity(fits[index]))
    return Recommendation(chosen, _why(fits[chosen], len(fitting), len(near), known_rate=best > 0))


def _complexity(fit: Candidate) -> tuple[int, int, bool, int, int, int, int]:
    """Return a sort key: less offload, less recomputation, not small, lower stage, larger micro-batch."""
    strategy = fit.strategy
    offload = (strategy.offload_optimizer, strategy.offload_param)
    return (
        OFFLOADS.index(offload) if offload in OFFLOADS else len(OFFLOADS),
        CHECKPOINTING.index(strategy.checkpointing),
        fit.plan.micro_batch_size * fit.plan.seq_len < SMALLEST_MICRO_BATCH_TOKENS,
        strategy.zero_stage,
        strategy.zero_hpz_partition_size,
        -fit.plan.micro_batch_size,
        -fit.spare_bytes,
    )


def _why(fit: Candidate, num_fitting: int, num_near: int, *, known_rate: bool) -> str:
    spare = f"leaves {format_size(fit.spare_bytes)} of each GPU free"
    if not fit.has_margin:
        spare += f", and no row leaves the margin of {MARGIN:.0%}: try it for some steps before you count on it"
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
    """Return the fewest and cheapest changes that make this run fit; None if it needs more GPUs.

    A smaller micro-batch costs least (the loss curve stays the same), then recomputation, then a higher stage, then
    offload. Raises ConfigError for a run that could not start anyway.
    """
    sizes = [micro_batch_size, *(size for size in reversed(cheapest_sizes(job)) if size < micro_batch_size)]
    now = strategy_of(ds, checkpointing)
    for size_steps, strategy in _alternatives(len(sizes), now):
        changed = ds if strategy == now else change_strategy(ds, strategy)
        if changed is None:
            continue
        fit = fit_at(_without_batch(changed), job, strategy.checkpointing, sizes[size_steps])
        if fit.has_margin:
            return Change(fit, tuple(_words(fit, now, micro_batch_size)))
    return None


@dataclass(frozen=True)
class Misfit:
    """How far a search in which nothing fits is from fitting."""

    nearest: Candidate
    """Row that misses least."""
    change: Change | None
    """Cheapest change of the user's settings that makes a row fit."""
    more_nodes: tuple[Machines, Candidate] | None
    """Fewest nodes with a row that fits, if no change helps; None if no number of nodes does."""


def find_misfit(search: Search, fits: Sequence[Candidate]) -> Misfit:
    """Return how far the rows of a search miss, and a remedy."""
    job, change = search.job, None
    # A setting that the user fixed may be changed; with all strategies tried, only more GPUs help.
    if search.files or job.micro_batch_size is not None or tuple(search.modes) != CHECKPOINTING:
        change = find_cheapest_change(job, fits)
    return Misfit(nearest_fit(fits), change, find_enough_nodes(job, fits) if change is None else None)


def find_cheapest_change(job: Job, fits: Sequence[Candidate]) -> Change | None:
    """Return the fewest and cheapest changes that make any row fit; None if all need more GPUs."""
    changes = [find_smallest_change(fit.ds, job, fit.strategy.checkpointing, fit.plan.micro_batch_size) for fit in fits]
    found = [change for change in changes if change is not None]
    return min(found, key=lambda change: (len(change.words), _complexity(change.fit)), default=None)


def _alternatives(num_sizes: int, now: Strategy) -> Iterator[tuple[int, Strategy]]:
    """Yield (index of a descending micro-batch, strategy), by the number of changes, then by their cost."""
    stages = [stage for stage in STAGES if stage >= now.zero_stage]
    modes = CHECKPOINTING[CHECKPOINTING.index(now.checkpointing) :]
    offload_now = (now.offload_optimizer, now.offload_param)
    start = OFFLOADS.index(offload_now) if offload_now in OFFLOADS else None
    # NVMe is never proposed, as the user must name its folder.
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
    """Return the config without batch sizes, which follow from the plan."""
    return replace(ds, keys=ds.keys.model_copy(update=dict.fromkeys(BATCH_KEYS)))


def _words(fit: Candidate, now: Strategy, micro_batch_size: int) -> Iterator[str]:
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


def find_enough_nodes(job: Job, fits: Sequence[Candidate]) -> tuple[Machines, Candidate] | None:
    """Return the fewest nodes, doubling, on which one of the rows' ds_configs fits.

    None if no number of nodes helps, because the memory that does not shrink with them is already too large.
    """
    machines = job.machines
    for _ in range(_MOST_DOUBLINGS):
        machines = replace(machines, num_nodes=2 * machines.num_nodes)
        larger = replace(job, machines=machines)
        if job.global_batch_size < larger.ranks.data_parallel_size:
            return None
        more = [fit_at(fit.ds, larger, fit.strategy.checkpointing, 1) for fit in fits]
        fitting = [fit for fit in more if fit.has_margin]
        if fitting:
            return machines, min(fitting, key=_complexity)
    return None


def nearest_fit(fits: Sequence[Candidate]) -> Candidate:
    """Return the row that misses least."""
    return max(fits, key=lambda fit: fit.spare_bytes)


def largest_preset(machines: Machines, precision: Precision) -> str | None:
    """Return the largest GPT-2 or GPT-3 preset that these machines train without offload; None if none fits."""
    ds = build_strategy(Strategy(max(STAGES), *OFFLOADS[0], CHECKPOINTING[-1]), precision)
    plain = {name: preset.shape(preset.vocab_size) for name, preset in PRESETS.items() if not preset.block}
    for name in sorted(plain, key=lambda name: plain[name].num_parameters, reverse=True):
        batch = PRESETS[name].global_batch_tokens // plain[name].seq_len
        if ds is not None and fit_at(ds, Job(plain[name], batch, machines), CHECKPOINTING[-1], 1).has_margin:
            return name
    return None


@dataclass(frozen=True)
class RankedConfig:
    """A row of `llmscale estimate`."""

    fit: Candidate
    throughput: Throughput | None
    """Speed of the row; None if the GPU's rate is unknown."""


@dataclass(frozen=True)
class Ranking:
    """All rows, and the one to take."""

    configs: tuple[RankedConfig, ...]
    recommendation: Recommendation | None
    """Row to take; None if nothing fits."""

    @property
    def recommended(self) -> RankedConfig | None:
        return self.configs[self.recommendation.index] if self.recommendation else None

    @property
    def fits(self) -> list[Candidate]:
        return [config.fit for config in self.configs]


def rank_configs(search: Search) -> Ranking:
    """Find rows, estimate their speed, and choose one. Raises ConfigError for more ranks than sequences."""
    configs = tuple(RankedConfig(fit, _throughput(search, fit)) for fit in find_fits(search))
    rates = [config.throughput.tokens_per_second if config.throughput else None for config in configs]
    return Ranking(configs, recommend([config.fit for config in configs], rates))


def fastest_by_link(search: Search) -> list[tuple[Interconnect, dict[str, float]]] | None:
    """Return tokens per second over every network, by stage, of the fastest row that fits; None at an unknown rate."""
    fits = [fit for fit in find_fits(search) if fit.fits]
    found = []
    for interconnect in INTERCONNECTS:
        best: dict[str, float] = {}
        for fit in fits:
            throughput = _throughput(replace(search, interconnect=interconnect), fit)
            if throughput is None:
                return None
            stage = fit.strategy.stage_words
            best[stage] = max(best.get(stage, 0.0), throughput.tokens_per_second)
        found.append((interconnect, best))
    return found


def fastest_by_split(search: Search, sizes: Sequence[int]) -> dict[int, RankedConfig | None]:
    """Return the recommended row by the number of GPUs that divide a sequence; None where nothing fits."""
    jobs = {size: replace(search.job, sequence_parallel_size=size) for size in sizes}
    return {size: rank_configs(replace(search, job=job)).recommended for size, job in jobs.items()}


def _throughput(search: Search, fit: Candidate) -> Throughput | None:
    job = search.job
    cluster = Cluster(search.gpu, job.machines.gpus_per_node, search.interconnect)
    return estimate_step(fit.step, cluster, KernelSettings(loss_chunk_tokens=fit.step.loss.chunk_tokens))
