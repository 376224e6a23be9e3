"""The rows of `llmscale estimate`: what fits, how fast it is, and which one to take. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.planning.largest_micro_batch import Fit, Job
from llmscale.planning.recommend import Recommendation, recommend
from llmscale.planning.throughput import Throughput, estimate_throughput


@dataclass(frozen=True)
class Row:
    """One ds_config at one micro-batch."""

    fit: Fit
    throughput: Throughput | None
    """None when the card's rate is not known."""


@dataclass(frozen=True)
class Rows:
    """All rows, and the one to take."""

    rows: tuple[Row, ...]
    recommendation: Recommendation | None
    """None when nothing fits."""

    @property
    def recommended(self) -> Row | None:
        return self.rows[self.recommendation.index] if self.recommendation else None


def build_rows(fits: Sequence[Fit], job: Job, gpu: GPU, interconnect: Interconnect) -> Rows:
    """Add the estimated speed to each, and choose."""
    rows = tuple(
        Row(
            fit,
            estimate_throughput(
                job.shape,
                fit.plan,
                fit.layout,
                fit.strategy.checkpointing,
                gpu,
                gpus_per_node=job.machines.gpus_per_node,
                interconnect=interconnect,
            ),
        )
        for fit in fits
    )
    rates = [row.throughput.tokens_per_second if row.throughput else None for row in rows]
    return Rows(rows, recommend(fits, rates))
