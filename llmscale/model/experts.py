"""Mixture of experts: a router sends each token to some of a block's MLPs (Shazeer et al. 2017), and drops none.

Tokens are sorted by expert, multiplied with the stacked matrices in one grouped product, and summed in a fixed order.
The experts of a block are one module with two parameters. ZeRO-3 thus gathers them at once, and no rank waits for
another one in an expert to which it sends no token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from llmscale.architecture.layers import INIT_STD
from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import LossSettings
from llmscale.model.attention_context import AttentionContext, compute_dtype
from llmscale.model.layers import MLP, activate, fill_normal_, residual_std

#: Columns after a block's tokens per expert in `GPT.routing`: sums over tokens of the router's entropy in nats, of
#: tokens that its bias sent to another expert, of Switch's balance loss over sequences, of the logits' squared
#: log-sum-exp over tokens.
ENTROPY = -4
MOVED = -3
BALANCE = -2
Z_SQUARED = -1
#: The grouped kernel takes rows that begin at multiples of this many bytes.
_ALIGNMENT = 16
_BLACKWELL = (10, 0)


# Operators of our own: torch's shape function of grouped_mm refuses fp32, which its kernel computes, so torch.compile
# and fake tensors would not have it.
@torch.library.custom_op("llmscale::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """Multiply rows of x [rows, in] with the matrix of their expert: weight [experts, in, out], or its transpose.

    The rows of expert e end before ends[e] (int32). Returns [rows, out].
    """
    if transposed:
        weight = weight.transpose(1, 2)
    if _suits_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=ends)
    y = x.new_empty(len(x), weight.shape[2])
    for expert, rows in enumerate(_rows_of(ends)):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


@torch.library.custom_op("llmscale::grouped_mm_of_weight", mutates_args=())
def grouped_mm_of_weight(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows of y [rows, out], transposed, with those of x [rows, in]: [experts, out, in]."""
    if _suits_kernel(y, x):
        product = F.grouped_mm(y.t(), x, offs=ends)
        if x.is_cuda and torch.cuda.get_device_capability(x.device) >= _BLACKWELL:
            # There the kernel leaves the gradients of an expert without rows as they were in memory (pytorch#172439).
            product.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0.0)
        return product
    return torch.stack([torch.mm(y[rows].t(), x[rows]) for rows in _rows_of(ends)])


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


@grouped_mm_of_weight.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


def _setup_context(
    ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], keyword_only_inputs: object, output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    if ctx.needs_input_grad[0]:
        of_x = grouped_mm(gradient, weight, ends, transposed=False)
    else:
        of_x = None
    if ctx.needs_input_grad[1]:
        of_weight = grouped_mm_of_weight(gradient, x, ends)
    else:
        of_weight = None
    return of_x, of_weight, None


# Only products with the transpose are differentiated.
grouped_mm.register_autograd(_backward, setup_context=_setup_context)


def _suits_kernel(*tensors: Tensor) -> bool:
    sizes = (size * tensor.itemsize for tensor in tensors for size in tensor.shape[1:])
    # A rank may get no rows at all.
    return all(map(len, tensors)) and all(size % _ALIGNMENT == 0 for size in sizes)


def _rows_of(ends: Tensor) -> list[slice]:
    """Return each expert's rows. Synchronises with the device."""
    last = ends.tolist()
    return [slice(begin, end) for begin, end in zip([0, *last], last, strict=False)]


class _Dispatch(torch.autograd.Function):
    """Rows of x [tokens, width] in the order of their experts, each `chosen` times: [tokens x chosen, width].

    The gradients of a token's copies are summed in a fixed order, unlike those of an index.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[order // (len(order) // len(x))]

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places].sum(1), None, None


class Permute(torch.autograd.Function):
    """Rows of y in another order: y[places], whose inverse is `order`."""

    @staticmethod
    def forward(ctx: FunctionCtx, y: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[places]

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.flatten(0, 1)[order], None, None


class Router(nn.Module):
    """Logits of the experts, and with a bias the balance of their load."""

    bias: Tensor | None
    """Added to the scores for the choice of experts alone, [experts] in fp32."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.n_embd))
        fill_normal_(self.weight, INIT_STD, generator)
        # .float(): zero.Init makes tensors in the training precision.
        self.register_buffer("bias", torch.zeros(shape.num_experts).float() if shape.router_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [tokens, n_embd] -> [tokens, experts] in fp32: in 16 bit the choice would be that of rounding."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Convert the weight alone to 16 bit: changes of the bias are smaller than its rounding."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None:
            self.bias = bias.to(self.bias.device)
        return self

    @torch.no_grad()
    def balance(self, load: Tensor, speed: float) -> None:
        """Raise the biases of experts with less than the mean `load` by `speed`, and lower the others' (Wang et al.
        2024, algorithm 1)."""
        assert self.bias is not None
        self.bias += speed * torch.sign(load.mean() - load)


class ExpertSplit(Protocol):
    """Equal parts of a block's experts, each with a model of its own (engine/parallel_ranks.py)."""

    @property
    def size(self) -> int:
        """Number of parts."""

    @property
    def index(self) -> int:
        """Index of the model's part."""

    def mark(self, parameter: nn.Parameter) -> None:
        """Note that the parameter holds the model's part of the experts."""

    def run(self, x: Tensor, ends: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return what all parts' `experts` compute from x [rows, n_embd]; the rows of expert e end before ends[e]."""


class Experts(nn.Module):
    """MLPs without biases, stacked; with `split` a part of them."""

    def __init__(self, shape: GPTShape, generator: torch.Generator, split: ExpertSplit | None = None) -> None:
        super().__init__()
        self.split = split
        self.activation = shape.activation
        self.is_gated = shape.gated_mlp
        part, parts = (split.index, split.size) if split is not None else (0, 1)
        count = shape.num_experts // parts
        width = shape.n_embd
        hidden = shape.expert_width
        self.up = nn.Parameter(torch.empty(count, 2 * hidden if self.is_gated else hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        for parameter, std in ((self.up, INIT_STD), (self.down, residual_std(shape.n_layer))):
            fill_normal_(parameter, std, generator, part=part, parts=parts)
            if split is not None:
                split.mark(parameter)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Compute [rows, n_embd] -> [rows, n_embd]; the rows of expert e end before ends[e]."""
        if self.split is None:
            return self._run(x, ends)
        return self.split.run(x, ends, self._run)

    def _run(self, x: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(self._hidden(x, ends), self.down.to(x.dtype), ends, transposed=True)

    def _hidden(self, x: Tensor, ends: Tensor) -> Tensor:
        """Compute [rows, expert_width]; its temporaries are freed before the next product."""
        y = grouped_mm(x, self.up.to(x.dtype), ends, transposed=True)
        if not self.is_gated:
            return activate(y, self.activation)
        gate, up = y.chunk(2, dim=-1)
        return activate(gate, self.activation) * up


class SparseMLP(nn.Module):
    """Router, experts and shared expert, in place of an MLP."""

    def __init__(
        self, shape: GPTShape, generator: torch.Generator, loss: LossSettings, split: ExpertSplit | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self._has_loss = loss.has_router_loss
        self.router = Router(shape, generator)
        self.experts = Experts(shape, generator, split)
        self.shared = MLP(shape, generator, shape.shared_expert_width) if shape.shared_expert_width else None

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """Compute [batch, t, n_embd] -> the same, and in training the block's row of `GPT.routing`.

        The row's last two numbers have gradients if a loss needs them.
        """
        flat = x.flatten(0, 1)
        logits: Tensor = self.router(flat)
        if self.shape.router_score == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        chosen = self._choose(scores.detach())
        y = self._run_experts(flat, chosen, self._weigh(scores, chosen))
        if self.shared is not None:
            y = y + self.shared(flat)
        y = F.dropout(y, self.shape.dropout, self.training).view_as(x)
        if not self.training:
            return y, None
        with torch.set_grad_enabled(self._has_loss and torch.is_grad_enabled()):
            shape = x.shape[:2]
            own = logits.unflatten(0, shape), scores.unflatten(0, shape), chosen.unflatten(0, shape)
            return y, self._describe(*own, context)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token: [tokens, experts] -> [tokens, experts_per_token]."""
        biased = scores if self.router.bias is None else scores + self.router.bias
        return biased.topk(self.shape.experts_per_token).indices

    def _weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of the chosen experts [tokens, experts_per_token]."""
        weights = scores.gather(1, chosen)
        if self.shape.normalize_router:
            # Not 0 / 0 where the sigmoids of all chosen experts underflow.
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        if self.shape.router_scale != 1:
            return weights * self.shape.router_scale
        return weights

    def _run_experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' results: [tokens, n_embd] -> [tokens, n_embd]."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        places = places.view_as(chosen)
        counts = torch.zeros(self.shape.num_experts, dtype=torch.long, device=x.device)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
        rows = _Dispatch.apply(x.to(compute_dtype(x)), order, places)
        y = Permute.apply(self.experts(rows, ends), order, places)
        return (y * weights.type_as(y)[..., None]).sum(1)

    def _describe(self, logits: Tensor, scores: Tensor, chosen: Tensor, context: AttentionContext) -> Tensor:
        """Return the row of `GPT.routing` [experts + 4] from tensors [batch, t, experts] and [batch, t, chosen].

        Switch's loss (Fedus et al. 2021, equation 4; 1 where experts have equal loads) is that of each sequence, as in
        DeepSeek V3: it is the same however ranks and micro-batches divide the sequences.
        """
        count = self.shape.num_experts
        t = logits.shape[1] - context.padding
        logits = logits[:, :t]
        scores = scores[:, :t]
        chosen = chosen[:, :t]
        shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
        load = torch.zeros(len(chosen), count, device=logits.device)
        flat = chosen.flatten(1)
        load.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float32))
        if context.split is None:
            of_sequence = load
        else:
            of_sequence = context.split.sum_over_parts(load)
        tokens = of_sequence.sum(1, keepdim=True) / self.shape.experts_per_token
        fractions = of_sequence * count / (self.shape.experts_per_token * tokens.square())
        balance = (fractions * shares.sum(1)).sum()
        z_squared = logits.logsumexp(-1).square().sum()
        entropy = torch.special.entr(shares.detach()).sum()
        sums = torch.stack((entropy, self._count_moved(scores.detach(), chosen), balance, z_squared))
        return torch.cat((load.sum(0), sums))

    def _count_moved(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the number of tokens that the bias sends to an expert with a lower score."""
        if self.router.bias is None:
            return scores.new_zeros(())
        unbiased = scores.topk(self.shape.experts_per_token).indices
        return (unbiased.sort(-1).values != chosen.sort(-1).values).any(-1).sum().float()
