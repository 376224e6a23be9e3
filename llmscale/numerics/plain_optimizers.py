"""One step of AdamW, Muon or Adafactor in fp64, by the flags of the run and not by the groups that llmscale builds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from llmscale.architecture.layers import ADAPTERS, is_adapter
from llmscale.architecture.shape import GPTShape
from llmscale.config.run_config import RunConfig

#: Momentum of Muon, and its coefficients (Jordan et al. 2024).
_MOMENTUM = 0.95
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
#: Standard deviation of initial weights: Adafactor's rate is relative to it, and the decay divided by as much.
_ADAFACTOR_FACTOR = 50.0


@dataclass(frozen=True)
class Rule:
    """Settings of one parameter in a run's flags."""

    lr_factor: float
    weight_decay: float
    kind: str
    """`adamw`, `muon` or `adafactor`."""

    @property
    def needs_all(self) -> bool:
        """Return whether a step needs the complete parameter, not any part of it."""
        return self.kind != "adamw"


def rule_of(config: RunConfig, name: str, dims: int) -> Rule:
    """Return the rule of a parameter with `dims` dimensions; the first matching --param-group has it."""
    decay = config.weight_decay if dims >= 2 else 0.0
    in_block = dims >= 2 and name.startswith("blocks.")
    is_muon = config.optimizer == "muon" and in_block and ".router." not in name
    factor = (config.muon_lr_factor or 1.0) if is_muon else 1.0
    for text in config.param_group:
        pattern, *settings = text.split(":")
        if fnmatchcase(name, pattern):
            values = dict(setting.split("=") for setting in settings)
            factor *= float(values.get("lr", "1x").rstrip("x"))
            decay = float(values.get("decay", decay))
            break
    if config.optimizer == "adafactor":
        return Rule(factor, decay / _ADAFACTOR_FACTOR, "adafactor")
    return Rule(factor, decay, "muon" if is_muon else "adamw")


def step_adamw(
    config: RunConfig, rule: Rule, lr: float, count: int, value: Tensor, gradient: Tensor, states: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the next value and the next moments of any elements; `count` steps are taken, this one included."""
    rate, b1, b2 = lr * rule.lr_factor, config.beta1, config.beta2
    mean = b1 * states["exp_avg"] + (1 - b1) * gradient
    square = b2 * states["exp_avg_sq"] + (1 - b2) * gradient.square()
    change = (mean / (1 - b1**count)) / ((square / (1 - b2**count)).sqrt() + config.eps)
    after = value * (1 - rate * rule.weight_decay) - rate * change
    return after, {"exp_avg": mean, "exp_avg_sq": square}


def step_muon(
    shape: GPTShape, name: str, rule: Rule, lr: float, value: Tensor, gradient: Tensor, momentum: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next value and momentum of a matrix, or of a stack of experts' matrices."""
    momentum = _MOMENTUM * momentum + (1 - _MOMENTUM) * gradient
    update = (1 - _MOMENTUM) * gradient + _MOMENTUM * momentum
    rows = [update.shape[-2]]
    if name.endswith("attn.qkv.weight"):
        rows = [shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim, shape.n_kv_head * shape.head_dim]
    elif shape.gated_mlp and name.endswith((".up.weight", "experts.up")):
        rows = [update.shape[-2] // 2] * 2
    elif is_adapter(name):
        of_layers = list(shape.adapter_rows(".".join(name.split(".")[2:-1])))
        rows = of_layers if name.endswith(ADAPTERS[1]) else [shape.lora_rank] * len(of_layers)
    pieces = []
    for piece in update.split(rows, -2):
        matrices = piece if piece.dim() == 3 else piece[None]
        pieces.append(torch.stack([_orthogonal(matrix) for matrix in matrices]).view_as(piece))
    rate = lr * rule.lr_factor
    return value * (1 - rate * rule.weight_decay) - rate * torch.cat(pieces, -2), momentum


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return Newton and Schulz's fifth iterate, with the root mean square 0.2 of an orthogonal matrix."""
    a, b, c = _POLYNOMIAL
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x) * (0.2 * math.sqrt(max(matrix.shape)))


def step_adafactor(rule: Rule, lr: float, value: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> Tensor:
    """Return the next value of a complete parameter, by torch's own Adafactor in fp64."""
    parameter = torch.nn.Parameter(value.clone())
    # The default of the first eps is that of the tensor's type: fp64's would be another optimizer.
    eps = (torch.finfo(torch.float32).eps, 1e-3)
    optimizer = torch.optim.Adafactor([parameter], lr=lr * rule.lr_factor, weight_decay=rule.weight_decay, eps=eps)
    if states:
        optimizer.state[parameter] = dict(states)
    parameter.grad = gradient.clone()
    optimizer.step()
    return parameter.detach()
