"""MLPs that run a tile of tokens at a time, so that their activations do not grow with the sequence.

With checkpointing of complete blocks the largest tensors of a long sequence are those within the MLP of the one block
that is recomputed: they are several times as wide as the residual stream. Here only a tile of them exists. The forward
pass keeps the MLP's input; the backward pass runs each tile again and adds its gradients of the weights, in fp32. The
idea is that of ALST's TiledMLP (Bekman et al. 2025). As the weights are inputs of one autograd function, ZeRO gets each
gradient once, complete.

`full` checkpointing recomputes a block for its graph. If norms come before, the MLP's result is only added to the
residual stream, and no gradient depends on it. So it is left out there, and the MLP is computed as often as without
tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.model.gpt import GPT
from llmscale.model.layers import MLP

_Run = Callable[[Tensor], Tensor]


def tile_mlps(model: GPT, tile_tokens: int, *, zero_stage: int, checkpointing: CheckpointingMode) -> None:
    """Let every MLP of `model` run `tile_tokens` tokens at a time. Call it before `deepspeed.initialize`.

    Dropout must be 0: its numbers are not repeated. ZeRO-3 gathers an MLP at once, not for every tile.
    """
    if zero_stage == 3:
        import deepspeed

        deepspeed.utils.set_z3_leaf_modules(model, [MLP])
    is_left_out = checkpointing == "full" and model.shape.norm_placement == "pre"
    for mlp in (module for module in model.modules() if isinstance(module, MLP)):
        mlp.forward = partial(_run, mlp, tile_tokens, is_left_out)  # type: ignore[method-assign]


def _run(mlp: MLP, tile_tokens: int, is_left_out: bool, x: Tensor) -> Tensor:
    """Run an MLP on [..., n_embd]; replaces `MLP.forward`. `is_left_out`: a recomputed block does not need it."""
    tokens, run = x.flatten(0, -2), partial(MLP.forward, mlp)
    # The second is true within a backward pass: torch's own checkpoint asks so, too.
    skips = is_left_out and torch._C._current_graph_task_id() != -1
    y: Tensor = _InTiles.apply(run, tile_tokens, skips, tokens, *mlp.parameters())
    return y.view_as(x)


def _autocast_of(x: Tensor) -> tuple[torch.dtype, bool]:
    """Return autocast's type for `x`'s device, and whether it is on."""
    return torch.get_autocast_dtype(x.device.type), torch.is_autocast_enabled(x.device.type)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    run: _Run
    tile_tokens: int
    autocast: tuple[torch.dtype, bool]


class _InTiles(torch.autograd.Function):
    """run, tile_tokens, skips, x [tokens, n_embd], weights of `run` -> [tokens, n_embd]; undefined if `skips`."""

    @staticmethod
    def forward(ctx: _Context, run: _Run, tile_tokens: int, skips: bool, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.tile_tokens = run, tile_tokens
        ctx.autocast = dtype, enabled = _autocast_of(x)
        ctx.save_for_backward(x, *weights)
        if skips:
            return torch.empty_like(x, dtype=dtype if enabled else x.dtype)
        y: Tensor | None = None
        for start in range(0, len(x), tile_tokens):
            tile = run(x[start : start + tile_tokens])
            y = tile.new_empty(x.shape) if y is None else y
            y[start : start + tile_tokens] = tile
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        trained = [weight for weight in weights if weight.requires_grad]
        of_x, sums = torch.empty_like(x), [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
        dtype, enabled = ctx.autocast
        for start in range(0, len(x), ctx.tile_tokens):
            part = slice(start, start + ctx.tile_tokens)
            tile = x[part].detach().requires_grad_()
            # Without autocast's cache, whose casts would belong to the first tile.
            with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled, cache_enabled=False):
                y = ctx.run(tile)
            of_x[part], *of_weights = torch.autograd.grad(y, [tile, *trained], gradient[part])
            for total, of_weight in zip(sums, of_weights, strict=True):
                total.add_(of_weight)
            del y, of_weights
        gradients = iter(total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True))
        return None, None, None, of_x, *(next(gradients) if weight.requires_grad else None for weight in weights)
