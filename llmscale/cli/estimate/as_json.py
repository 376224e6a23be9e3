"""What `llmscale estimate` knows, as JSON values."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import TYPE_CHECKING

from llmscale.memory.estimate import RESERVED_PER_ALLOCATED, MemoryEstimate
from llmscale.planning.recommend import RankedConfig, Ranking
from llmscale.planning.search import Candidate, Search, Strategy

if TYPE_CHECKING:
    from llmscale.dry_run.on_demand import Comparison
    from llmscale.planning.search import LargestModel


def search_as_dict(search: Search) -> dict[str, object]:
    """Model, machines and what was assumed."""
    job, machines = search.job, search.job.machines
    return {
        "shape": {**asdict(job.shape), "num_parameters": job.shape.num_parameters},
        "global_batch_size": job.global_batch_size,
        "optimizer": job.optimizer.name,
        "gpu": asdict(search.gpu),
        "interconnect": search.interconnect.name,
        "machines": {**asdict(machines), "world_size": machines.world_size},
        "assumed": {"reserved_per_allocated": RESERVED_PER_ALLOCATED},
    }


def ranking_as_dict(ranking: Ranking, names: list[str] | None) -> dict[str, object]:
    """Every row, and the one to take."""
    chosen = ranking.recommendation
    return {
        "rows": [
            {"ds_config": name, **_row_as_dict(row)}
            for row, name in zip(ranking.configs, names or itertools.repeat(None, len(ranking.configs)), strict=True)
        ],
        "recommended": None if chosen is None else {"row": chosen.index, "why": chosen.why},
    }


def largest_models_as_list(models: list[LargestModel]) -> list[dict[str, object]]:
    """One entry a strategy."""
    return [
        {
            "strategy": strategy_as_dict(model.strategy),
            "shape": None if model.shape is None else asdict(model.shape),
            "num_parameters": None if model.shape is None else model.shape.num_parameters,
            "preset": model.preset,
            "total_bytes": None if model.fit is None else model.fit.estimate.total_bytes,
        }
        for model in models
    ]


def estimate_as_dict(estimate: MemoryEstimate) -> dict[str, object]:
    """Bytes of one rank."""
    return {
        "moments": {name: moment.as_dict() for name, moment in estimate.moments.items()},
        "peak_moment": estimate.peak_moment,
        "peak": estimate.peak.as_dict(),
        "allocated_bytes": estimate.allocated_bytes,
        "reserved_bytes": estimate.reserved_bytes,
        "context_bytes": estimate.context_bytes,
        "total_bytes": estimate.total_bytes,
        "host_bytes": estimate.host_bytes,
        "nvme_bytes": estimate.nvme_bytes,
    }


def _row_as_dict(row: RankedConfig) -> dict[str, object]:
    fit = row.fit
    return {
        "strategy": strategy_as_dict(fit.strategy),
        "precision": fit.step.precision,
        "micro_batch_size": fit.plan.micro_batch_size,
        "gradient_accumulation_steps": fit.plan.gradient_accumulation_steps,
        "grad_accum_dtype": fit.step.engine_config.grad_accum_dtype,
        "estimate": estimate_as_dict(fit.estimate),
        **_fit_as_dict(fit),
        "throughput": None if row.throughput is None else asdict(row.throughput),
    }


def _fit_as_dict(fit: Candidate) -> dict[str, object]:
    return {
        "fits": fit.fits,
        "spare_bytes": fit.spare_bytes,
        "host_bytes_per_node": fit.host_bytes_per_node,
        "nvme_bytes_per_node": fit.nvme_bytes_per_node,
    }


def comparison_as_dict(comparison: Comparison) -> dict[str, object]:
    """Dry run and closed form, phase by phase."""
    return {
        "zero_stage": comparison.fit.strategy.zero_stage,
        "seconds": comparison.dry_run.seconds,
        "resident": comparison.dry_run.resident.as_dict(),
        "least_gpu_bytes": comparison.dry_run.least_gpu_bytes,
        "phases": {
            phase: {"dry_run": counted.as_dict(), "closed_form": calculated.as_dict()}
            for phase, (counted, calculated) in comparison.phases.items()
        },
    }


def strategy_as_dict(strategy: Strategy) -> dict[str, object]:
    """In the words of flags and ds_configs."""
    values = asdict(strategy)
    values["activation_checkpointing"] = values.pop("checkpointing")
    return values
