"""Activation checkpointing: a block keeps all activations, its matrix products, or its input alone.

`full` is DeepSpeed's checkpoint, so that every key of the ds_config's `activation_checkpointing` section has
DeepSpeed's meaning. `selective` is PyTorch's, within which two dispatch modes keep the results of chosen operators and
hand them out again. With both, losses and gradients stay bit-identical at ZeRO stages 0 to 3, dropout included.

MLPs may run a tile of tokens at a time, so that their activations do not grow with the sequence.

With checkpointing of complete blocks the largest tensors of a long sequence are those within the MLP of the one block
that is recomputed: they are several times as wide as the residual stream. Here only a tile of them exists. The forward
pass keeps the MLP's input; the backward pass runs each tile again and adds its gradients of the weights, in fp32. The
idea is that of ALST's TiledMLP (Bekman et al. 2025). As the weights are inputs of one autograd function, ZeRO gets each
gradient once, complete. `selective` keeps nothing of what runs within a tile.

Checkpointing recomputes a block for its graph. If norms come before, the MLP's result is only added to the residual
stream, and no gradient depends on it. So it is left out there: no checkpoint computes an MLP in tiles once more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.engine.deepspeed_patches import gather_as_one
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT, BlockCheckpoint, BlockOutput
from llmscale.model.layers import MLP

_aten = torch.ops.aten
#: Operators whose recomputation is expensive for the memory of their results: matrix products and fused attention.
#: The others (norms, GELU, dropout, residual sums) are cheap. In units of batch x t x n_embd elements a block keeps
#: 16 without checkpointing, 11 with `selective` and 1 with `full`, all without dropout's masks.
_SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        torch.ops.llmscale.grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)


def build_block_checkpoint(mode: CheckpointingMode, ds_section: Mapping[str, object]) -> BlockCheckpoint | None:
    """Return the function that runs a block; None to keep every activation.

    `ds_section` is the ds_config's `activation_checkpointing` section. `full` configures DeepSpeed's checkpointing,
    which is global to the process and needs torch.distributed to be initialised. Raises ConfigError for keys that the
    mode cannot honour.
    """
    if mode == "none":
        return None
    switched_on = sorted(key for key, value in ds_section.items() if value)
    if mode == "selective":
        if switched_on:
            raise ConfigError(
                f"'selective' activation checkpointing cannot honour the ds_config's {switched_on[0]}. "
                "Remove the key, or choose 'full', which honours it."
            )
        return _run_selective
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed empties a tensor that it has copied to the host; on a CPU machine the copy is the tensor itself.
    on_cpu = get_accelerator().device_name() == "cpu"
    deepspeed.checkpointing.configure(
        None,
        num_checkpoints=ds_section.get("number_checkpoints"),
        checkpoint_in_cpu=bool(ds_section.get("cpu_checkpointing")) and not on_cpu,
        synchronize=bool(ds_section.get("synchronize_checkpoint_boundary")),
        profile=bool(ds_section.get("profile")),
    )
    return _run_full


def _run_full(block: nn.Module, x: Tensor, *context: object) -> BlockOutput:
    """Run a block and keep only its input [batch, t, n_embd], on the host with cpu_checkpointing."""
    import deepspeed

    # DeepSpeed recomputes outside of autocast, which would silently change the gradients.
    dtype, enabled = _autocast_of(x)

    def run(x: Tensor) -> BlockOutput:
        with torch.autocast(x.device.type, dtype, enabled):
            return block(x, *context)

    # DeepSpeed gives the weights no gradients if the input has none, as after frozen embeddings.
    if torch.is_grad_enabled() and not x.requires_grad and any(weight.requires_grad for weight in block.parameters()):
        x = x.detach().requires_grad_()
    return deepspeed.checkpointing.checkpoint(run, x)


def _run_selective(block: nn.Module, x: Tensor, *context: object) -> BlockOutput:
    """Run a block, keep its input and the results of `_SAVED_OPS`, and recompute the rest.

    With ZeRO-3 the recomputation holds the block's gathered weights until the end of the block's backward pass.
    """

    def run(x: Tensor) -> BlockOutput:
        y = block(x, *context)
        anchored: BlockOutput
        if isinstance(y, tuple):
            anchored = _Anchor.apply(*y)
        else:
            anchored = _Anchor.apply(y)
        return anchored

    return checkpoint(
        run,
        x,
        use_reentrant=False,
        context_fn=_keep_and_take,
        # ZeRO-3 saves empty shards in the forward pass and gathered weights in the recomputation: shapes differ.
        determinism_check="none",
    )


class _Anchor(torch.autograd.Function):
    """Identity at a block's end that triggers the recomputation before any gradient enters the block.

    ZeRO-3 gathers a module's weights when gradients reach its output. Without the anchor the module's saved tensors
    would trigger the recomputation afterwards, and its post-forward hooks would release the weights during the
    backward pass. Also, PyTorch stops a recomputation at the last tensor it needs: inside the block, where DeepSpeed's
    post-forward hooks would be skipped.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, y: Tensor, *routing: Tensor) -> BlockOutput:
        ctx.save_for_backward(y)
        if routing:
            return (y.view_as(y), routing[0].view_as(routing[0]))
        return y.view_as(y)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, *gradients: Tensor) -> tuple[Tensor, ...]:
        _ = ctx.saved_tensors  # unpacking triggers the recomputation
        return gradients


class _Products(TorchDispatchMode):
    """A pass through a block that treats the results of `_SAVED_OPS` apart, and runs everything else.

    PyTorch's own contexts want every operator of the recomputation to have run in the forward pass. With ZeRO-3 the
    operators differ: a block gathers those weights itself that no earlier block has prefetched.
    """

    def __init__(self, products: deque[tuple[torch._ops.OpOverload, object]]) -> None:
        super().__init__()
        self.products = products
        self.is_paused = False

    def __torch_dispatch__(
        self,
        op: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        call = partial(op, *args, **(kwargs or {}))
        if self.is_paused or not _is_saved(op, args, kwargs or {}):
            return call()
        return self.treat(op, call)

    def treat(self, op: torch._ops.OpOverload, call: Callable[[], object]) -> object:
        """Return the result of an operator of `_SAVED_OPS`."""
        raise NotImplementedError


class _KeepProducts(_Products):
    """The forward pass."""

    def treat(self, op: torch._ops.OpOverload, call: Callable[[], object]) -> object:
        """Run the operator and keep its result."""
        result = call()
        self.products.append((op, tree_map_only(Tensor, Tensor.detach, result)))
        return result


class _TakeProducts(_Products):
    """The recomputation."""

    def treat(self, op: torch._ops.OpOverload, call: Callable[[], object]) -> object:
        """Hand out what the forward pass kept, in its order."""
        expected, result = self.products.popleft() if self.products else (None, None)
        if op is not expected:
            raise RuntimeError(f"The recomputation of a block runs {op} where its forward pass ran {expected}.")
        return result


def _keep_and_take() -> tuple[_Products, _Products]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    products: deque[tuple[torch._ops.OpOverload, object]] = deque()
    return _KeepProducts(products), _TakeProducts(products)


@contextlib.contextmanager
def _kept_by_nobody() -> Iterator[None]:
    """Let no checkpoint keep or hand out what runs inside."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Products)]
    for mode in modes:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in modes:
            mode.is_paused = False


def save_products(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Decide whether an operator's result is saved or recomputed in a graph that PyTorch compiles."""
    if _is_saved(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(op: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether an operator's result is saved.

    Attention with dropout is recomputed. Skipping it would shift the random numbers of every later dropout in the
    block, and the gradients would belong to other masks than the loss.
    """
    if op not in _SAVED_OPS:
        return False
    arguments = {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}
    return not arguments.get("dropout_p")


_RunMLP = Callable[[Tensor], Tensor]


def tile_mlps(model: GPT, tile_tokens: int, *, zero_stage: int, checkpointing: CheckpointingMode) -> None:
    """Let every MLP of `model` run `tile_tokens` tokens at a time. Call it before `deepspeed.initialize`.

    Dropout must be 0: its numbers are not repeated. ZeRO-3 gathers an MLP at once, not for every tile.
    """
    if zero_stage == 3:
        gather_as_one(model, MLP)
    is_left_out = checkpointing != "none" and model.shape.norm_placement == "pre"
    for mlp in (module for module in model.modules() if isinstance(module, MLP)):
        mlp.forward = partial(_run_mlp, mlp, tile_tokens, is_left_out)  # type: ignore[method-assign]


def _run_mlp(mlp: MLP, tile_tokens: int, is_left_out: bool, x: Tensor) -> Tensor:
    """Run an MLP on [..., n_embd]; replaces `MLP.forward`. `is_left_out`: a recomputed block does not need it."""
    tokens = x.flatten(0, -2)
    run = partial(MLP.forward, mlp)
    # The second is true within a backward pass: torch's own checkpoint asks so, too.
    skips = is_left_out and torch._C._current_graph_task_id() != -1
    y: Tensor = _InTiles.apply(run, tile_tokens, skips, tokens, *mlp.parameters())
    return y.view_as(x)


def _autocast_of(x: Tensor) -> tuple[torch.dtype, bool]:
    """Return autocast's type for `x`'s device, and whether it is on."""
    return torch.get_autocast_dtype(x.device.type), torch.is_autocast_enabled(x.device.type)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    run: _RunMLP
    tile_tokens: int
    autocast: tuple[torch.dtype, bool]


class _InTiles(torch.autograd.Function):
    """run, tile_tokens, skips, x [tokens, n_embd], weights of `run` -> [tokens, n_embd]; undefined if `skips`."""

    @staticmethod
    def forward(ctx: _Context, run: _RunMLP, tile_tokens: int, skips: bool, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run = run
        ctx.tile_tokens = tile_tokens
        ctx.autocast = dtype, enabled = _autocast_of(x)
        ctx.save_for_backward(x, *weights)
        if skips:
            return torch.empty_like(x, dtype=dtype if enabled else x.dtype)
        y: Tensor | None = None
        with _kept_by_nobody():
            for start in range(0, len(x), tile_tokens):
                tile = run(x[start : start + tile_tokens])
                if y is None:
                    y = tile.new_empty(x.shape)
                y[start : start + tile_tokens] = tile
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        trained = [weight for weight in weights if weight.requires_grad]
        of_x = torch.empty_like(x)
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
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
