"""A GPT and one step of AdamW, Muon or Adafactor, written for reading, from the papers: the truth of every comparison.

They share nothing with `llmscale.model` and `llmscale.engine` but the table of rotary frequencies, so that a bug there
cannot hide here: the optimizers follow the flags of the run, not the groups that llmscale builds. In the GPT one expert
runs at a time, and every score of attention is in memory. In fp64 it is the truth that an engine is compared with, in
the run's type the measure of what rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llmscale.architecture.layers import ADAPTERS, is_adapter
from llmscale.architecture.rope_scaling import rotary_factor, rotary_frequencies
from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import LossSettings
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError

#: Momentum of Muon, and its coefficients (Jordan et al. 2024).
_MOMENTUM = 0.95
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
#: Standard deviation of initial weights: Adafactor's rate is relative to it, and the decay divided by as much.
_ADAFACTOR_FACTOR = 50.0
#: Adafactor's exponent of the weight of new squares, least second moment, and least root mean square of a weight.
_ADAFACTOR_DECAY = -0.8
_ADAFACTOR_EPS = 2.0**-23
_ADAFACTOR_LEAST_SIZE = 1e-3
#: Optimizers that have a plain step here.
OPTIMIZERS = ("adamw", "muon", "adafactor")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
#: Values that PlainGPT computes, by field of the shape.
SHAPE_VALUES: Mapping[str, Collection[str | None]] = {
    "activation": ACTIVATIONS,
    "norm": ("layernorm", "rmsnorm"),
    "norm_placement": ("pre", "post"),
    "positions": ("learned", "rotary"),
    "qk_norm": ("none", "head", "width"),
    "attention_bias": (None, "none", "qkv", "all"),
    "attention_kernel": ("auto", "sdpa"),
    "router_score": ("softmax", "sigmoid"),
}
#: Settings of the loss that PlainGPT computes, or that change no number.
LOSS_SETTINGS = ("chunk_tokens", "kernel", "z_loss", "balance_loss", "router_z_loss", "router_bias_speed")


@dataclass
class PlainGPT:
    """One forward pass: weights in any type, the complete vocabulary, no ranks."""

    weights: Mapping[str, Tensor]
    shape: GPTShape
    loss: LossSettings
    router_biases: Sequence[Tensor]
    """Bias of each sparse block's router; empty without."""
    router_loss: Tensor | float = field(init=False, default=0.0)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return every token's cross-entropy [batch, t], and the loss that trains; tokens: ids [batch, t + 1]."""
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        logits = self._logits(inputs)
        z = torch.logsumexp(logits, -1)
        each = z - logits.gather(-1, targets[..., None])[..., 0]
        return each, each.mean() + self.loss.z_loss * z.square().mean() + self.router_loss

    def _logits(self, inputs: Tensor) -> Tensor:
        shape = self.shape
        weights = self.weights
        index = torch.arange(inputs.shape[1], device=inputs.device)
        first = self._first_of_document(inputs, index)
        places = index - first
        distance = index[:, None] - index[None, :]
        dense = (distance >= 0) & (index >= first[:, :, None])
        if shape.sliding_window:
            local = dense & (distance < shape.sliding_window)
        else:
            local = dense
        x = F.embedding(inputs, weights["wte.weight"])
        if shape.positions == "learned":
            x = x + F.embedding(places, weights["wpe.weight"])
        sparse_blocks = 0
        for layer in range(shape.n_layer):
            is_local = shape.window_pattern[layer % len(shape.window_pattern)] == "L"
            bias = None
            if shape.is_sparse(layer):
                bias = self.router_biases[sparse_blocks] if self.router_biases else None
                sparse_blocks += 1
            # Recomputed, so that the weights of one block at a time are there in the type of the products.
            visible = local if is_local else dense
            x = checkpoint(self._block, x, layer, places, visible, bias, use_reentrant=False, preserve_rng_state=False)
        x = self._norm(x, "ln_f")
        head = weights["wte.weight" if shape.tied else "head.weight"]
        return _wide(F.linear(x, head[: shape.vocab_size]))

    def _first_of_document(self, inputs: Tensor, index: Tensor) -> Tensor:
        """Return the first position of each token's document, [batch, t]."""
        begins = torch.zeros_like(inputs, dtype=torch.bool)
        if self.shape.document_end is not None:
            begins[:, 1:] = inputs[:, :-1] == self.shape.document_end
        return torch.where(begins, index, 0).cummax(1).values

    def _block(self, x: Tensor, layer: int, places: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
        name = f"blocks.{layer}."
        is_sparse = self.shape.is_sparse(layer)

        def mlp(x: Tensor) -> Tensor:
            if is_sparse:
                return self._experts(x, f"{name}mlp.", bias)
            return self._mlp(x, f"{name}mlp.")

        if self.shape.norm_placement == "pre":
            x = x + self._attention(self._norm(x, f"{name}ln_1"), f"{name}attn.", places, visible)
            return x + mlp(self._norm(x, f"{name}ln_2"))
        x = x + self._norm(self._attention(x, f"{name}attn.", places, visible), f"{name}ln_1")
        return x + self._norm(mlp(x), f"{name}ln_2")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        if (a := self.weights.get(f"{name}.lora_A")) is None:
            return y
        rank = self.shape.lora_rank
        rows = self.shape.adapter_rows(".".join(name.split(".")[2:]))
        inner = F.linear(x, a) * (self.shape.lora_alpha / rank)
        b = self.weights[f"{name}.lora_B"]
        parts = zip(inner.split(rank, -1), b.split(rows), strict=True)
        return y + torch.cat([F.linear(part, of_part) for part, of_part in parts], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        if self.shape.norm == "rmsnorm":
            return self._rms_norm(x, weight)
        wide = _wide(x)
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_eps) * _wide(weight)
        return (wide if bias is None else wide + _wide(bias)).to(weight.dtype)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = _wide(x)
        mean_square = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.shape.norm_eps) * _wide(weight)).to(weight.dtype)

    def _attention(self, x: Tensor, name: str, places: Tensor, visible: Tensor) -> Tensor:
        shape = self.shape
        heads = shape.n_head
        kv_heads = shape.n_kv_head
        width = shape.head_dim
        q, k, v = self._linear(x, f"{name}qkv").split((heads * width, kv_heads * width, kv_heads * width), -1)
        if shape.qk_norm == "width":
            q, k = self._norm_of_heads(q, k, name)
        q = q.unflatten(-1, (heads, width))
        k = k.unflatten(-1, (kv_heads, width))
        v = v.unflatten(-1, (kv_heads, width))
        if shape.qk_norm == "head":
            q, k = self._norm_of_heads(q, k, name)
        q = q.to(v.dtype)
        k = k.to(v.dtype)
        if shape.positions == "rotary":
            q = self._rotate(q, places)
            k = self._rotate(k, places)
        k = k.repeat_interleave(heads // kv_heads, 2)
        v = v.repeat_interleave(heads // kv_heads, 2)
        # each [batch, heads, t, width]
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        scores = _wide(q @ k.transpose(2, 3)) / math.sqrt(width)
        shares = torch.softmax(scores.masked_fill(~visible[:, None], -math.inf), -1).to(v.dtype)
        return self._linear((shares @ v).transpose(1, 2).flatten(2), f"{name}proj")

    def _norm_of_heads(self, q: Tensor, k: Tensor, name: str) -> tuple[Tensor, Tensor]:
        q = self._rms_norm(q, self.weights[f"{name}q_norm.weight"])
        return q, self._rms_norm(k, self.weights[f"{name}k_norm.weight"])

    def _rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate halves of [batch, t, heads, head_dim] by the places [batch, t] (Su et al. 2021)."""
        shape = self.shape
        turns = rotary_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        angles = places[..., None].double() * torch.tensor(turns, dtype=torch.float64, device=x.device)
        factor = rotary_factor(shape.rope_scaling)
        cos = (angles.cos() * factor).to(x.dtype)[:, :, None]
        sin = (angles.sin() * factor).to(x.dtype)[:, :, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _activate(self, hidden: Tensor) -> Tensor:
        if not self.shape.gated_mlp:
            return self._nonlinear(hidden)
        gate, value = hidden.chunk(2, -1)
        return self._nonlinear(gate) * value

    def _nonlinear(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.shape.activation](x)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        return self._linear(self._activate(self._linear(x, f"{name}up")), f"{name}down")

    def _experts(self, x: Tensor, name: str, bias: Tensor | None) -> Tensor:
        """Compute a mixture of experts, and add the losses of its router (Fedus et al. 2021, Zoph et al. 2022)."""
        shape = self.shape
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(_wide(flat), _wide(self.weights[f"{name}router.weight"]))
        if shape.router_score == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        chosen = (scores.detach() + (0 if bias is None else bias)).topk(shape.experts_per_token).indices
        factors = scores.gather(1, chosen)
        if shape.normalize_router:
            factors = factors / factors.sum(1, keepdim=True)
        factors = factors * shape.router_scale
        up = self.weights[f"{name}experts.up"]
        down = self.weights[f"{name}experts.down"]
        y = torch.zeros((), dtype=flat.dtype, device=x.device)
        for expert in range(shape.num_experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            rows = F.linear(self._activate(F.linear(flat[token], up[expert])), down[expert])
            rows = rows * factors[token, slot][:, None].to(rows.dtype)
            y = y + torch.zeros(flat.shape, dtype=rows.dtype, device=x.device).index_add(0, token, rows)
        if shape.shared_expert_width:
            y = y + self._mlp(flat, f"{name}shared.")
        self.router_loss = self.router_loss + self._router_loss(logits, scores, chosen, x.shape[0])
        return y.view(x.shape).to(x.dtype)

    def _router_loss(self, logits: Tensor, scores: Tensor, chosen: Tensor, batch: int) -> Tensor:
        shape = self.shape
        share = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (batch, -1)).mean(1)
        load = F.one_hot(chosen, shape.num_experts).to(share.dtype).unflatten(0, (batch, -1)).sum(2).mean(1)
        balance = (shape.num_experts * (load / shape.experts_per_token * share).sum(1)).mean()
        z_squared = torch.logsumexp(logits, -1).square().mean()
        return self.loss.balance_loss * balance + self.loss.router_z_loss * z_squared


def _wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is."""
    if x.dtype == torch.float64:
        return x
    return x.float()


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
    """Return the rule of a parameter with `dims` dimensions; the first matching --param-group has it.

    Raises ConfigError for an optimizer without a plain step.
    """
    _refuse(_unknown_optimizer(config.optimizer))
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
    rate = lr * rule.lr_factor
    b1 = config.beta1
    b2 = config.beta2
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
        if name.endswith(ADAPTERS[1]):
            rows = of_layers
        else:
            rows = [shape.lora_rank] * len(of_layers)
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


def step_adafactor(
    rule: Rule, lr: float, count: int, value: Tensor, gradient: Tensor, states: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the next value and second moments of a complete parameter (Shazeer & Stern 2018).

    `count` steps are taken, this one included. Without states, as at the first step, all moments are 0.
    """
    rate = lr * rule.lr_factor
    fresh = count**_ADAFACTOR_DECAY

    def averaged(key: str, now: Tensor) -> Tensor:
        if states:
            return (1 - fresh) * states[key].view_as(now) + fresh * now
        return fresh * now

    squares = gradient.square()
    if value.dim() >= 2:
        rows = averaged("row_var", squares.mean(-1, keepdim=True))
        columns = averaged("col_var", squares.mean(-2, keepdim=True))
        second = rows * columns / rows.mean(-2, keepdim=True).clamp(min=_ADAFACTOR_EPS)
        moments = {"row_var": rows, "col_var": columns}
    else:
        second = averaged("variance", squares)
        moments = {"variance": second}
    update = gradient / second.clamp(min=_ADAFACTOR_EPS**2).sqrt()
    update = update / max(1.0, _root_mean_square(update))
    size = max(_ADAFACTOR_LEAST_SIZE, _root_mean_square(value)) * min(rate, 1 / math.sqrt(count))
    return value * (1 - rate * rule.weight_decay) - size * update, moments


def _root_mean_square(x: Tensor) -> float:
    return math.sqrt(float(x.square().mean()))


def check_is_plain(optimizer: str, shape: GPTShape, loss: LossSettings) -> None:
    """Raise ConfigError for a part of a run that this module does not compute, which no check could compare."""
    unknown = _unknown_optimizer(optimizer)
    for name, values in SHAPE_VALUES.items():
        if getattr(shape, name) not in values:
            unknown.append(f"{name} {getattr(shape, name)!r}")
    for entry in fields(loss):
        if entry.name not in LOSS_SETTINGS and getattr(loss, entry.name) != entry.default:
            unknown.append(f"{entry.name} {getattr(loss, entry.name)!r}")
    _refuse(unknown)


def _unknown_optimizer(name: str) -> list[str]:
    return [] if name in OPTIMIZERS else [f"optimizer {name!r}"]


def _refuse(unknown: Sequence[str]) -> None:
    """Raise ConfigError for parts of a run that are not plain, if there are any."""
    if unknown:
        raise ConfigError(
            f"the check of numbers cannot judge {', '.join(unknown)}: llmscale/numerics/plain.py does not compute it. "
            "Write its plain arithmetic there, or train without --check-numerics."
        )
