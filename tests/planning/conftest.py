"""Layouts as train.py would resolve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import resolve_ds_config
from llmscale.config.deepspeed.schema import parse_ds_config
from llmscale.config.deepspeed.sections import Precision
from llmscale.config.hardware import get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.memory.zero_settings import EngineLayout, build_layout
from llmscale.planning.largest_micro_batch import Job, Search

LayoutOf = Callable[[Mapping[str, object], GPTShape, BatchPlan], EngineLayout]


def search(job: Job, precision: Precision = "bf16", **keys: object) -> Search:
    """Of the speed, which GPU and network it is does not matter here."""
    return Search(job, get_gpu("a100-80gb"), get_interconnect("ib-400g"), precision, **keys)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def layout_of() -> LayoutOf:
    """Function from (ds_config file, shape, plan) to the layout on GPUs."""

    def build(ds: Mapping[str, object], shape: GPTShape, plan: BatchPlan) -> EngineLayout:
        return build_layout(resolve_ds_config(parse_ds_config(dict(ds), "test"), shape, plan), plan.ranks)

    return build
