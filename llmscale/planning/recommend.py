"""The rows of `llmscale estimate` with their speed, the row to take, and changes that make a run fit. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.deepspeed.resolve import BATCH_KEYS
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import INTERCONNECTS, Cluster, Interconnect
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.breakdown import format_size
from llmscale.planning.kernels import KernelSettings
from llmscale.planning.search import (
    CHECKPOINTING,
    MARGIN,
    OFFLOADS,
    STAGES,
    Candidate,
    Fit,
    Strategy,
    Trial,
    change_strategy,
    cheapest_sizes,
    evaluate,
    find_largest_fit,
    may_fit,
    strategy_of,
    with_micro_batch,
)
from llmscale.planning.step_time import SMALLEST_MICRO_BATCH_TOKENS, Throughput, estimate_step

#: Relative difference below which two rates count as equal, given the accuracy of the model.
_SAME_RATE = 0.03
#: Doublings of the nodes to try when nothing fits.
_MOST_DOUBLINGS = 10
#: Fewest and most rows to choose between, of those that fit.
_FEWEST_CHOICES = 3
_MOST_CHOICES = 5


@dataclass(frozen=True)
class Recommendation:
    """Row to take."""

    index: int
    why: str
    """Reason, one sentence."""


@dataclass(frozen=True)
class Change:
    """A run that fits, and its differences from one that does not."""

    fit: Fit
    words: tuple[str, ...]
    """Changes, as flags and ds_config keys."""

    def describe(self) -> str:
        return f"{' and '.join(self.words)} ({format_size(self.fit.spare_bytes)} to spare)"


def recommend(fits: Sequence[Fit], tokens_per_second: Sequence[float | None]) -> Recommendation | None:
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


def _complexity(fit: Fit) -> tuple[int, int, bool, int, int, int, int]:
    """Return a sort key: less offload, less recomputation, not small, lower stage, larger micro-batch."""
    strategy = fit.strategy
    offload = (strategy.offload_optimizer, strategy.offload_param)
    return (
        OFFLOADS.index(offload) if offload in OFFLOADS else len(OFFLOADS),
        CHECKPOINTING.index(strategy.activation_checkpointing),
        fit.micro_batch_tokens < SMALLEST_MICRO_BATCH_TOKENS,
        strategy.zero_stage,
        strategy.zero_hpz_partition_size,
        -fit.micro_batch_size,
        -fit.spare_bytes,
    )


def _why(fit: Fit, num_fitting: int, num_near: int, *, known_rate: bool) -> str:
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


def find_smallest_change(step: ResolvedStep, cluster: Cluster) -> Change | None:
    """Return the fewest and cheapest changes that make this run fit; None if it needs more GPUs.

    A smaller micro-batch costs least (the loss curve stays the same), then recomputation, then a higher stage, then
    offload. Raises ConfigError for a run that could not start anyway.
    """
    now = strategy_of(step.ds, step.checkpointing)
    micro_batch_size = step.plan.micro_batch_size
    sizes = [micro_batch_size, *(size for size in reversed(cheapest_sizes(step)) if size < micro_batch_size)]
    for size_steps, strategy in _alternatives(len(sizes), now):
        ds = step.ds if strategy == now else change_strategy(step.ds, strategy)
        if ds is None or (ds.zero_stage and not step.optimizer.steps_shards):
            continue
        # Batch sizes follow from the plan.
        ds = replace(ds, keys=ds.keys.model_copy(update=dict.fromkeys(BATCH_KEYS)))
        changed = step.changed(ds=ds, checkpointing=strategy.activation_checkpointing)
        fit = _fit_with_margin(with_micro_batch(changed, sizes[size_steps]), cluster)
        if fit:
            return Change(fit, tuple(_words(fit, now, micro_batch_size)))
    return None


@dataclass(frozen=True)
class Misfit:
    """How far a search in which nothing fits is from fitting."""

    nearest: Candidate
    """Row that misses least."""
    change: Change | None
    """Cheapest change of the user's settings that makes a row fit."""
    more_nodes: Candidate | None
    """Row that fits on the fewest nodes, if no change helps; None if no number of nodes does."""


def find_misfit(fits: Sequence[Candidate], *, is_restricted: bool) -> Misfit:
    """Return how far these rows miss, and a remedy. `is_restricted`: the user fixed some of the settings."""
    # A setting that the user fixed may be changed; with all strategies tried, only more GPUs help.
    if is_restricted:
        change = find_cheapest_change(fits)
    else:
        change = None
    return Misfit(nearest_fit(fits), change, find_enough_nodes(fits) if change is None else None)


def find_cheapest_change(fits: Sequence[Candidate]) -> Change | None:
    """Return the fewest and cheapest changes that make any row fit; None if all need more GPUs."""
    changes = [find_smallest_change(fit.step, fit.cluster) for fit in fits]
    helping = [change for change in changes if change is not None]
    return min(helping, key=lambda change: (len(change.words), _complexity(change.fit)), default=None)


def _alternatives(num_sizes: int, now: Strategy) -> Iterator[tuple[int, Strategy]]:
    """Yield (index of a descending micro-batch, strategy), by the number of changes, then by their cost."""
    stages = [stage for stage in STAGES if stage >= now.zero_stage]
    modes = CHECKPOINTING[CHECKPOINTING.index(now.activation_checkpointing) :]
    offload_now = (now.offload_optimizer, now.offload_param)
    if offload_now in OFFLOADS:
        start = OFFLOADS.index(offload_now)
    else:
        start = None
    # NVMe is never proposed, as the user must name its folder.
    if start is not None:
        offloads = [pair for pair in OFFLOADS[start:] if "nvme" not in pair]
    else:
        offloads = []
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


def _words(fit: Candidate, now: Strategy, micro_batch_size: int) -> Iterator[str]:
    then = fit.strategy
    if fit.plan.micro_batch_size != micro_batch_size:
        yield f"--micro-batch-size {fit.plan.micro_batch_size} instead of {micro_batch_size}"
    if then.activation_checkpointing != now.activation_checkpointing:
        yield f"--activation-checkpointing {then.activation_checkpointing}"
    if then.zero_stage != now.zero_stage:
        yield f"ZeRO stage {then.zero_stage} instead of {now.zero_stage}"
    if then.zero_hpz_partition_size != now.zero_hpz_partition_size:
        yield "no zero_hpz_partition_size"
    if then.offload_optimizer != now.offload_optimizer:
        yield f'offload_optimizer to "{then.offload_optimizer}"'
    if then.offload_param != now.offload_param:
        yield f'offload_param to "{then.offload_param}"'


def find_enough_nodes(fits: Sequence[Candidate]) -> Candidate | None:
    """Return the row that fits on the fewest nodes, doubling.

    None if no number of nodes helps, because the memory that does not shrink with them is already too large.
    """
    cluster = fits[0].cluster
    # One of those that keep the fewest activations fits first.
    most = max(CHECKPOINTING.index(fit.step.checkpointing) for fit in fits)
    smallest = [fit for fit in fits if fit.step.checkpointing == CHECKPOINTING[most]]
    for _ in range(_MOST_DOUBLINGS):
        cluster = replace(cluster, num_nodes=2 * cluster.num_nodes)
        if any(fit.plan.global_batch_size < _ranks_on(fit.step, cluster).data_parallel_size for fit in fits):
            return None
        if any(map(partial(_fit_on, cluster=cluster), smallest)):
            more = (_fit_on(fit, cluster) for fit in fits)
            return min(filter(None, more), key=_complexity)
    return None


def _ranks_on(step: ResolvedStep, cluster: Cluster) -> ParallelLayout:
    return replace(step.plan.ranks, world_size=cluster.world_size)


def _fit_on(fit: Candidate, cluster: Cluster) -> Candidate | None:
    """Estimate a row on another cluster, with a micro-batch of 1; None if it does not fit with MARGIN."""
    return _fit_with_margin(with_micro_batch(fit.step, 1, _ranks_on(fit.step, cluster)), cluster)


def _fit_with_margin(step: ResolvedStep, cluster: Cluster) -> Candidate | None:
    """Estimate a step; None if it does not fit with MARGIN."""
    if may_fit(step, cluster):
        fit = evaluate(step, cluster)
    else:
        fit = None
    return fit if fit and fit.has_margin else None


def nearest_fit(fits: Sequence[Candidate]) -> Candidate:
    """Return the row that misses least."""
    return max(fits, key=lambda fit: fit.spare_bytes)


@dataclass(frozen=True)
class RankedConfig:
    """A row of `llmscale estimate`: a run on the GPUs, with its memory and its speed."""

    DERIVED: ClassVar = (
        "strategy",
        "fit.step.precision",
        "fit.plan.micro_batch_size",
        "fit.plan.gradient_accumulation_steps",
        "fit.plan.filler_share",
        "fit.step.engine_config.grad_accum_dtype",
        "fit.estimate",
        "fit.fits",
        "fit.has_margin",
        "fit.spare_bytes",
        "fit.host_bytes_per_node",
        "fit.save_bytes_per_node",
        "fit.nvme_bytes_per_node",
        "fit.verdict",
        "usd_per_billion_tokens",
    )

    fit: Candidate = field(repr=False)
    throughput: Throughput | None
    """Speed of the row; None if the GPU's rate is unknown."""
    ds_config: str | None = None
    """Name of the user's ds_config."""
    gpu: str | None = None
    """Name of the GPU, where several are compared."""
    usd_per_gpu_hour: float | None = None

    @property
    def strategy(self) -> Strategy:
        return self.fit.strategy

    @property
    def batch(self) -> str:
        return f"{self.fit.plan.micro_batch_size} x {self.fit.plan.gradient_accumulation_steps}"

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate of a row that fits."""
        if self.throughput and self.fit.fits:
            return self.throughput.tokens_per_second
        return None

    @property
    def mfu(self) -> float | None:
        """Return the MFU of a row that fits."""
        return self.throughput.mfu if self.throughput and self.fit.fits else None

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """Return the price of a billion tokens; None if the row does not fit, or without the price of a GPU-hour."""
        if not self.tokens_per_second or not self.usd_per_gpu_hour:
            return None
        return self.usd_per_gpu_hour * self.fit.cluster.world_size / 3600 / self.tokens_per_second * 1e9


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
    def nearest(self) -> RankedConfig:
        """Row to take, or the one that misses least."""
        return self.recommended or self.configs[self.fits.index(nearest_fit(self.fits))]

    @property
    def fits(self) -> list[Candidate]:
        return [config.fit for config in self.configs]


def rank_trials(trials: Sequence[Trial], cluster: Cluster) -> Ranking:
    """Fit every trial, estimate its speed, and choose one. Raises ConfigError for more ranks than sequences."""
    fits = [find_largest_fit(trial, cluster) for trial in trials]
    configs = tuple(RankedConfig(fit, _throughput(fit, cluster)) for fit in fits)
    return Ranking(configs, recommend(fits, [config.tokens_per_second for config in configs]))


def distinct_rows(ranking: Ranking) -> list[int]:
    """Return all rows, on one GPU only the best of the stages, which divide nothing there."""
    rows = ranking.configs
    if rows[0].fit.cluster.world_size > 1:
        return [*range(len(rows))]
    best: dict[tuple[str, str], int] = {}
    for index in _by_preference(ranking):
        strategy = rows[index].fit.strategy
        best.setdefault((strategy.offload, strategy.activation_checkpointing), index)
    return sorted(best.values())


def choose_between(ranking: Ranking) -> list[int]:
    """Return the rows to choose between, those that miss least where nothing fits.

    These are the recommended one, the fastest of every other stage (on one GPU: of every mode of checkpointing), and if
    that is few, the fastest others.
    """
    rows = ranking.configs
    distinct = set(distinct_rows(ranking))
    order = [index for index in _by_preference(ranking) if index in distinct]
    fitting = [index for index in order if rows[index].fit.fits]
    best: dict[str, int] = {}
    for index in fitting:
        strategy = rows[index].fit.strategy
        divides = rows[index].fit.cluster.world_size > 1
        best.setdefault(strategy.stage_words if divides else strategy.activation_checkpointing, index)
    count = min(max(len(best), _FEWEST_CHOICES), _MOST_CHOICES)
    return sorted([*dict.fromkeys([*best.values(), *(fitting or order)])][:count])


def _by_preference(ranking: Ranking) -> list[int]:
    """Return the rows: the recommended one first, then those with margin by their rate, then by the bytes they miss."""
    chosen = ranking.recommendation.index if ranking.recommendation else None

    def key(index: int) -> tuple[bool, bool, float, int]:
        row = ranking.configs[index]
        if row.fit.fits:
            preference = -(row.tokens_per_second or 0.0)
        else:
            preference = -row.fit.spare_bytes
        return index != chosen, not row.fit.has_margin, preference, index

    return sorted(range(len(ranking.configs)), key=key)


def fastest_by_link(trials: Sequence[Trial], cluster: Cluster) -> list[tuple[Interconnect, dict[str, float]]] | None:
    """Return tokens per second over every network, by stage, of the fastest row that fits; None at an unknown rate."""
    fits = [fit for fit in (find_largest_fit(trial, cluster) for trial in trials) if fit.fits]
    rates = []
    for interconnect in INTERCONNECTS:
        best: dict[str, float] = {}
        for fit in fits:
            throughput = _throughput(fit, replace(cluster, interconnect=interconnect))
            if throughput is None:
                return None
            stage = fit.strategy.stage_words
            best[stage] = max(best.get(stage, 0.0), throughput.tokens_per_second)
        rates.append((interconnect, best))
    return rates


def fastest_by_split(trials: Sequence[Trial], cluster: Cluster, sizes: Sequence[int]) -> dict[int, RankedConfig | None]:
    """Return the recommended row by the number of GPUs that divide a sequence; None where nothing fits."""
    rows = {}
    for size in sizes:
        plans = [(trial, replace(trial.step.plan.ranks, sequence_parallel_size=size)) for trial in trials]
        split = [
            replace(trial, step=with_micro_batch(trial.step, trial.step.plan.micro_batch_size, ranks))
            for trial, ranks in plans
        ]
        rows[size] = rank_trials(split, cluster).recommended
    return rows


def _throughput(fit: Candidate, cluster: Cluster) -> Throughput | None:
    return estimate_step(fit.step, cluster, KernelSettings(loss_chunk_tokens=fit.step.loss.chunk_tokens))
