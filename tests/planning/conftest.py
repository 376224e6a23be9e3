"""Layouts as train.py would resolve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import resolve_ds_config
from llmscale.config.deepspeed.schema import parse_ds_config
from llmscale.memory.zero_settings import EngineLayout, build_layout

LayoutOf = Callable[[Mapping[str, object], GPTShape, BatchPlan], EngineLayout]


@pytest.fixture(scope="session")
def layout_of() -> LayoutOf:
    """Function from (ds_config file, shape, plan) to the layout on GPUs."""

    def build(ds: Mapping[str, object], shape: GPTShape, plan: BatchPlan) -> EngineLayout:
        return build_layout(resolve_ds_config(parse_ds_config(dict(ds), "test"), shape, plan), plan.ranks)

    return build
