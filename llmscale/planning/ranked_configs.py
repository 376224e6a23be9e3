"""The rows of `llmscale estimate`: what fits, how fast it is, and which one to take. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmscale.config.hardware import Cluster
from llmscale.config.interconnect import INTERCONNECTS, Interconnect
from llmscale.planning.kernels import Kernels
from llmscale.planning.largest_micro_batch import Fit, Search, find_fits
from llmscale.planning.recommend import Recommendation, recommend
from llmscale.planning.throughput import Throughput, estimate_step


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


def fastest_by_link(search: Search) -> list[tuple[Interconnect, dict[str, float]]] | None:
    """Tokens per second over every network there is, of each stage's fastest row that fits: `Strategy.stage_words` ->
    rate, for the stages of which something fits. None when the GPU's rate is not known."""
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


def _throughput(search: Search, fit: Fit) -> Throughput | None:
    job = search.job
    cluster = Cluster(search.gpu, job.machines.gpus_per_node, search.interconnect)
    return estimate_step(fit.step, cluster, Kernels(loss_chunk_tokens=fit.step.loss.chunk_tokens))
