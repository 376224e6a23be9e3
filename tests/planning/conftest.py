"""Steps as train.py would resolve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import get_gpu, get_interconnect
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.planning.search import Job, Search

StepOf = Callable[..., ResolvedStep]


def search(job: Job, precision: Precision = "bf16", **keys: object) -> Search:
    """Of the speed, which GPU and network it is does not matter here."""
    return Search(job, get_gpu("a100-80gb"), get_interconnect("ib-400g"), precision, **keys)  # type: ignore[arg-type]


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
