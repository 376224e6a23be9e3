"""The optimizer that DeepSpeed wraps: decay groups, fused AdamW, and Adafactor where it can work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

import torch
from torch import nn

from llmscale.engine.adafactor import check_adafactor_stage


class ParameterGroup(TypedDict):
    """One torch parameter group; `name` is how a checkpoint finds its hyperparameters again."""

    name: str
    params: list[nn.Parameter]
    weight_decay: float


def build_parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[ParameterGroup]:
    """Matrices and embeddings decay; biases and norms, of one dimension, do not (GPT-2/GPT-3 practice).

    Groups without parameters are left out: DeepSpeed would drop them and shift the numbers of the others.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.requires_grad:
            (decay if _num_dimensions(parameter) >= 2 else no_decay).append(parameter)
    groups: list[ParameterGroup] = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    *,
    name: Literal["adamw", "adafactor"],
    zero_stage: int,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """A torch optimizer over the model's parameters; ConfigError for Adafactor under ZeRO.

    AdamW is torch's own fused kernel on every device: on a CPU, where offloaded states live, it needs no extension to
    be compiled, which DeepSpeed's CPUAdam does.
    """
    groups = [dict(group) for group in build_parameter_groups(model.named_parameters(), weight_decay)]
    if name == "adafactor":
        check_adafactor_stage(zero_stage)
        return torch.optim.Adafactor(groups, lr=lr, weight_decay=weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def _num_dimensions(parameter: nn.Parameter) -> int:
    """Dimensions before ZeRO-3 flattened the parameter (its own shape is then [0])."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
