"""The optimizer that DeepSpeed wraps, built from its description in `llmscale.config.optimizers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

import torch
from torch import nn

from llmscale.architecture.layers import ParameterKind
from llmscale.config.optimizers import OptimizerSpec
from llmscale.engine.device_memory import has_bf16
from llmscale.engine.muon import Muon
from llmscale.engine.process_group import is_gpu


class ParameterGroup(TypedDict):
    """One torch parameter group; `name` is how a checkpoint finds its hyperparameters again."""

    name: str
    params: list[nn.Parameter]
    weight_decay: float


def build_parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    kinds: Mapping[str, ParameterKind],
    spec: OptimizerSpec,
    weight_decay: float,
) -> list[ParameterGroup]:
    """The optimizer's groups; `kinds` says what each parameter is, which ZeRO-3 has flattened.

    Groups without parameters are left out: DeepSpeed would drop them and shift the numbers of the others.
    """
    groups: dict[str, ParameterGroup] = {
        group.name: {"name": group.name, "params": [], "weight_decay": weight_decay if group.decays else 0.0}
        for group in spec.groups
    }
    for name, parameter in named:
        if parameter.requires_grad:
            groups[spec.group_of(kinds[name]).name]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(
    model: nn.Module,
    kinds: Mapping[str, ParameterKind],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """A torch optimizer over the model's parameters; Muon must be bound to the engine.

    AdamW is torch's own fused kernel on every device: on a CPU, where offloaded states live, it needs no extension to
    be compiled, which DeepSpeed's CPUAdam does.
    """
    groups = [dict(group) for group in build_parameter_groups(model.named_parameters(), kinds, spec, weight_decay)]
    if spec.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr, weight_decay=weight_decay)
    if spec.name == "muon":
        orthogonalised = {group.name for group in spec.groups if group.is_orthogonalised}
        return Muon(
            groups,
            orthogonalised=orthogonalised,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            dtype=newton_schulz_dtype(),
        )
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def newton_schulz_dtype() -> torch.dtype:
    """bf16 on GPUs that have it, as Muon was published; a CPU has nothing faster than fp32."""
    return torch.bfloat16 if is_gpu() and has_bf16() else torch.float32
