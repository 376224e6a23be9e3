"""deepspeed.initialize without the optimizer step that DeepSpeed takes there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from llmscale.engine.deepspeed_patches import without_memory_prints
from llmscale.engine.engine_values import check_engine
from llmscale.engine.process_group import leave_out_shared_memory_op
from llmscale.engine.zero_layout import check_deepspeed_version, name_groups

if TYPE_CHECKING:
    from torch import nn


def initialize(*, model: nn.Module, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Return what `deepspeed.initialize` returns for the same arguments: engine, optimizer, data loader, scheduler.

    At stage 0 in bf16, DeepSpeed 0.19 steps the optimizer once while it builds the engine, with gradients of zero:
    weight decay changes the master weights, and Adam counts the step. Here the optimizer's first step creates its
    states instead. Collective. Raises CheckpointError for a release of DeepSpeed that was not tested, and ConfigError
    for an engine that could not be saved and continued, fp16 at stage 0 among them.
    """
    import deepspeed

    check_deepspeed_version()
    leave_out_shared_memory_op()
    if dist.is_initialized():
        arguments.setdefault("dist_init_required", False)
    with without_memory_prints(), _without_first_step():
        built = deepspeed.initialize(model=model, **arguments)
    check_engine(built[0])
    name_groups(built[0])
    return built


@contextmanager
def _without_first_step() -> Iterator[None]:
    """Keep DeepSpeed's optimizers of stage 0 in 16 bit from stepping while they are built."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    kinds = (FP16_Optimizer, FP16_UnfusedOptimizer)
    before = [kind.initialize_optimizer_states for kind in kinds]
    for kind in kinds:
        kind.initialize_optimizer_states = lambda self: None
    try:
        yield
    finally:
        for kind, method in zip(kinds, before, strict=True):
            kind.initialize_optimizer_states = method
