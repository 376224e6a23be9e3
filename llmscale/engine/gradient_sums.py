"""Gradients of micro-batches summed in fp32 at stage 0, for which DeepSpeed 0.19.8 has nothing.

Stages 1 to 3 have it (`data_types.grad_accum_dtype`); at stage 0 DeepSpeedEngine._do_optimizer_sanity_check refuses
sums in another type than the parameters'. So there the sums are ours: a gradient is added to its sum as soon as
autograd has it, and DeepSpeed finds the whole sum in its place, rounded once, when it reduces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from llmscale.config.deepspeed.schema import DsFile

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def sums_are_ours(ds_config: Mapping[str, object]) -> bool:
    """Whether a resolved ds_config asks for sums that DeepSpeed does not make."""
    keys = DsFile.model_validate(dict(ds_config))
    wanted = keys.data_types.grad_accum_dtype if keys.data_types else None
    return keys.zero.stage == 0 and wanted not in (None, keys.model_dtype)


def without_sums(ds_config: Mapping[str, object]) -> dict[str, object]:
    """The same for DeepSpeed, which is to know nothing of them."""
    types = cast("Mapping[str, object]", ds_config["data_types"])
    kept = {key: value for key, value in types.items() if key != "grad_accum_dtype"}
    return {**ds_config, "data_types": kept}


def sum_gradients_in_fp32(engine: DeepSpeedEngine) -> None:
    """From now on; with one micro-step per step there is nothing to sum."""
    if engine.gradient_accumulation_steps() == 1:
        return
    sums: dict[nn.Parameter, Tensor] = {}

    def add(param: nn.Parameter) -> None:
        assert param.grad is not None
        if param in sums:
            sums[param].add_(param.grad)
        else:
            sums[param] = param.grad.float()
        param.grad = None

    def hand_over() -> None:
        for param in list(sums):
            param.grad = sums.pop(param).to(param.dtype)

    reduce = engine.allreduce_gradients

    def allreduce_gradients(*args: object, **kwargs: object) -> None:
        if engine.is_gradient_accumulation_boundary():
            hand_over()
        reduce(*args, **kwargs)

    for param in engine.module.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(add)
    engine.allreduce_gradients = allreduce_gradients
