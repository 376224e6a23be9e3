"""Steps as train.py would resolve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import Cluster, get_gpu, get_interconnect
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.planning.search import CHECKPOINTING, Trial, try_strategies

StepOf = Callable[..., ResolvedStep]


def cluster_of(
    gib: float = 24, gpus_per_node: int = 8, num_nodes: int = 1, host_bytes: int | None = None, gpu: str = "a100-80gb"
) -> Cluster:
    """Return machines whose GPUs have so much memory."""
    smaller = replace(get_gpu(gpu), memory_gib=gib)
    return Cluster(smaller, gpus_per_node, get_interconnect("ib-400g"), num_nodes, host_bytes)


def ds_of(
    stage: int, precision: str | None = "bf16", sections: Mapping[str, object] | None = None, **zero: object
) -> DsConfig:
    """Return the ds_config of a stage."""
    enabled = {precision: {"enabled": True}} if precision else {}
    return parse_ds_config({"zero_optimization": {"stage": stage, **zero}, **enabled, **(sections or {})}, "test.json")


def step_on(
    cluster: Cluster,
    ds: DsConfig,
    shape: GPTShape,
    batch: int,
    mode: CheckpointingMode = "none",
    micro: int = 1,
    *,
    split: int = 1,
    experts: int = 1,
) -> ResolvedStep:
    """Return a step on a cluster, where `split` ranks divide a sequence and `experts` the experts of a block."""
    ranks = ParallelLayout(cluster.world_size, split, experts)
    plan = build_batch_plan(global_batch_size=batch, ranks=ranks, seq_len=shape.seq_len, micro_batch_size=micro)
    return resolve_step(ds, shape, plan, mode)


def strategies_on(
    cluster: Cluster,
    shape: GPTShape,
    batch: int,
    precision: str = "bf16",
    modes: Sequence[CheckpointingMode] = CHECKPOINTING,
) -> list[Trial]:
    """Return a run with every strategy that DeepSpeed can train."""
    return try_strategies(Trial(step_on(cluster, ds_of(3, precision), shape, batch)), modes)


@pytest.fixture(scope="session")
def step_of() -> StepOf:
    """Function from (ds_config file, shape, plan, checkpointing, optimizer) to the step on GPUs; `zero` replaces keys
    of the resolved zero_optimization."""

    def build(
        ds: Mapping[str, object],
        shape: GPTShape,
        plan: BatchPlan,
        checkpointing: CheckpointingMode = "none",
        optimizer: OptimizerSpec = ADAMW,
        zero: Mapping[str, object] | None = None,
    ) -> ResolvedStep:
        written = {**ds, "zero_optimization": {**ds["zero_optimization"], **(zero or {})}}  # type: ignore[dict-item]
        return resolve_step(parse_ds_config(written, "test"), shape, plan, checkpointing, optimizer)

    return build
