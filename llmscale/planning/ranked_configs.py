"""The rows of `llmscale estimate`: what fits, how fast it is, and which one to take. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.planning.largest_micro_batch import Fit, Search, find_fits
from llmscale.planning.recommend import Recommendation, recommend
from llmscale.planning.throughput import Throughput, estimate_throughput


@dataclass(frozen=True)
class RankedConfig:
    """One ds_config at one micro-batch."""

    fit: Fit
    throughput: Throughput | None
    """None when the GPU's rate is not known."""


@dataclass(frozen=True)
class Ranking:
    """All that were tried, and the one to take."""

    configs: tuple[RankedConfig, ...]
    recommendation: Recommendation | None
    """None when nothing fits."""

    @property
    def recommended(self) -> RankedConfig | None:
        return self.configs[self.recommendation.index] if self.recommendation else None

    @property
    def fits(self) -> list[Fit]:
        return [config.fit for config in self.configs]


def rank_configs(search: Search) -> Ranking:
    """Find what fits, estimate its speed, and choose. Raises ConfigError for a batch that cannot be divided."""
    configs = tuple(RankedConfig(fit, _throughput(search, fit)) for fit in find_fits(search))
    rates = [config.throughput.tokens_per_second if config.throughput else None for config in configs]
    return Ranking(configs, recommend([config.fit for config in configs], rates))


def _throughput(search: Search, fit: Fit) -> Throughput | None:
    job = search.job
    return estimate_throughput(
        job.shape,
        fit.plan,
        fit.layout,
        fit.strategy.checkpointing,
        search.gpu,
        gpus_per_node=job.machines.gpus_per_node,
        interconnect=search.interconnect,
    )
