"""Training loss and token scores of a linear head, a chunk of tokens at a time.

Only one chunk's logits exist at a time, and the fp32 softmax of a part of them. The forward pass computes the gradients
of the hidden states and of the head's weights while a chunk's logits exist; the backward pass only scales them. The
matrix products are the same three as without chunks. Liger Kernel (Hsu et al. 2024) works alike, but training in 16 bit
needs two differences: the weights' gradient is summed over chunks in fp32, and it is divided by the number of tokens
only in the backward pass, together with the product with the loss scale, which would come too late in fp16.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmscale.config.bundled_files import install_command
from llmscale.config.loss_settings import LossSettings, softmax_tokens
from llmscale.errors import ConfigError
from llmscale.model.attention_context import compute_dtype

#: Logits of a row that one Triton program holds, and its warps, as in Liger Kernel. Liger measured the warps on Hopper
#: and earlier GPUs, and uses fewer on Blackwell in 16 bit, which is left out here.
_MAX_BLOCK = 32768
_WARPS = 32


class Losses(NamedTuple):
    """Losses of one micro-batch, in fp32."""

    mean: Tensor
    """Cross-entropy in nats per token: a scalar, the only one with gradients."""
    mean_z_squared: Tensor | None
    """A scalar; None without a z-loss."""
    of_sequences: Tensor | None
    """Cross-entropy in nats per token of each sequence [batch], if requested."""

    def scaled(self, factor: float) -> Losses:
        """Return all losses times `factor`."""
        if factor == 1:
            return self
        z_squared = self.mean_z_squared
        each = self.of_sequences
        return Losses(
            self.mean * factor,
            None if z_squared is None else z_squared * factor,
            None if each is None else each * factor,
        )


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    settings: LossSettings,
    *,
    each_sequence: bool = False,
    is_target: Tensor | None = None,
) -> Losses:
    """Compute the mean cross-entropy in nats of softmax(x weight^T) over all positions, and with a z-loss mean z^2.

    `is_target`, bool [...], is False for positions whose loss is 0; they count in the mean nevertheless.

    x: [..., n_embd]; weight: [rows, n_embd], whose rows from `vocab_size` on are padding without logits; targets:
    ids [...]. z is the log-sum-exp of a position's logits. A z-loss (PaLM, Chowdhery et al. 2022, section 5; ST-MoE,
    Zoph et al. 2022, equation 5) affects the gradients and not the value, so that losses with and without it compare:
    the first result's gradients are those of cross-entropy + settings.z_loss x mean z^2.
    """
    device = x.device.type
    inputs = _LossInputs(
        vocab_size,
        settings,
        compute_dtype(x),
        # Read here: inside a Function gradients are disabled.
        torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
        weight.requires_grad,
        each_sequence,
    )
    with torch.autocast(device, enabled=False):
        if is_target is None:
            counted = None
        else:
            counted = is_target.flatten()
        loss, z_squared, each = _ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten(), inputs, counted)
    return Losses(loss, z_squared, None if each is None else each.view(targets.shape).mean(1))


def score_tokens(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk_tokens: int) -> Tensor:
    """Return each target's log-probability in nats, and 1 where it is the likeliest token, else 0: [batch, t, 2], fp32.

    x: [batch, t, n_embd]; weight: [rows, n_embd], whose rows from `vocab_size` on are padding without logits; targets:
    ids [batch, t]. Without gradients. Of equally likely tokens the first is the likeliest. The arithmetic is that of a
    validation loss.
    """
    device = x.device.type
    dtype = compute_dtype(x)
    flat = x.flatten(0, -2)
    flat_targets = targets.flatten()
    scores = torch.empty(len(flat), 2, dtype=torch.float32, device=x.device)
    with torch.no_grad(), torch.autocast(device, enabled=False):
        weight_cast = weight.to(dtype)
        for start in range(0, len(flat), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            target = flat_targets[chunk]
            logits = torch.mm(flat[chunk].to(dtype), weight_cast.t())
            logits[:, vocab_size:] = -torch.inf
            scores[chunk, 1] = (logits.argmax(1) == target).float()
            log_probs = F.log_softmax(logits, 1, dtype=torch.float32)
            scores[chunk, 0] = log_probs.gather(1, target[:, None])[:, 0]
    return scores.view(*targets.shape, 2)


def check_fused_loss(device_type: str) -> None:
    """Raise ConfigError when Liger's kernel is not installed or has no GPU; Triton's interpreter needs none."""
    try:
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel
    except ImportError as error:
        raise ConfigError(
            f"--loss-kernel liger needs Liger Kernel and Triton ({error}): `{install_command('liger')}`. "
            "Or leave the flag out: --loss-kernel torch."
        ) from None
    del liger_cross_entropy_kernel
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"--loss-kernel liger runs on GPUs, and this run on {device_type}. Leave the flag out: --loss-kernel torch."
        )


@dataclass(frozen=True)
class _LossInputs:
    vocab_size: int
    settings: LossSettings
    dtype: torch.dtype
    """Type of the matrix products."""
    wants_gradients: bool
    trains_weight: bool
    """False if only the hidden states need gradients."""
    wants_each: bool


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor | None]
    weight_dtype: torch.dtype
    fp16_downscale: float


class _ChunkedCrossEntropy(torch.autograd.Function):
    """x [tokens, n_embd], weight [rows, n_embd], targets [tokens], which of them count [tokens] or None for all -> mean
    loss, mean z^2 if any, losses [tokens] if requested, all in fp32."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor, targets: Tensor, inputs: _LossInputs, counted: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens = len(x)
        chunk_tokens = inputs.settings.chunk_tokens
        losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
        if inputs.settings.z_loss:
            z = torch.empty_like(losses)
        else:
            z = None
        # Liger's kernel needs no fp32 softmax.
        if inputs.settings.kernel == "liger":
            at_once = 0
        else:
            at_once = softmax_tokens(min(tokens, chunk_tokens))
        log_probs = torch.empty(at_once, len(weight), dtype=torch.float32, device=x.device)
        weight_cast = weight.to(inputs.dtype)
        if inputs.wants_gradients:
            gradients = _Gradients(x, weight_cast, chunk_tokens, inputs.trains_weight)
        else:
            gradients = None
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, tokens))
            buffers = _LossBuffers(
                losses[chunk],
                None if z is None else z[chunk],
                log_probs,
                None if counted is None else ~counted[chunk],
            )
            _run_chunk(chunk, x, weight_cast, targets[chunk], inputs, buffers, gradients)
        if gradients is not None:
            ctx.weight_dtype = weight.dtype
            ctx.fp16_downscale = gradients.fp16_downscale
            ctx.save_for_backward(gradients.of_x, gradients.of_weight)  # type: ignore[arg-type]  # None is legal
        if z is None:
            z_squared = None
        else:
            z_squared = z.square().mean()
        each = losses if inputs.wants_each else None
        ctx.mark_non_differentiable(*(tensor for tensor in (z_squared, each) if tensor is not None))
        return losses.mean(), z_squared, each

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor, *_: object) -> tuple[Tensor, Tensor | None, None, None, None]:
        of_x, of_weight = ctx.saved_tensors
        # [1] and not a scalar, which would be rounded to 16 bit first: products are taken in fp32 and rounded once.
        scale = (gradient / len(of_x)).reshape(1)
        x_gradient = torch.mul(of_x, scale, out=torch.empty_like(of_x))
        if of_weight is None:
            return x_gradient, None, None, None, None
        weight_gradient = torch.mul(
            of_weight, scale.mul_(ctx.fp16_downscale), out=torch.empty_like(of_weight, dtype=ctx.weight_dtype)
        )
        return x_gradient, weight_gradient, None, None, None


class _Gradients:
    """Gradients of the summed loss: of_x [tokens, n_embd] in x's type, of_weight [rows, n_embd] summed in fp32."""

    of_weight: Tensor | None = None
    """Gradient of the weights, divided by `fp16_downscale`; None if they are frozen."""

    def __init__(self, x: Tensor, weight: Tensor, chunk_tokens: int, trains_weight: bool) -> None:
        self.of_x = torch.empty_like(x)
        self._is_one_chunk = len(x) <= chunk_tokens
        self._trains_weight = trains_weight
        # A chunk's sum over tokens can exceed fp16's range before it is divided by their number, whatever the loss
        # scale: it is as large as the chunk when all tokens have one target. A power of two costs no digits.
        is_fp16 = weight.dtype == torch.float16
        if is_fp16:
            self.fp16_downscale = 2.0 ** max(0, min(len(x), chunk_tokens).bit_length() - 6)
        else:
            self.fp16_downscale = 1.0
        if trains_weight and not self._is_one_chunk:
            self.of_weight = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, chunk: slice, of_logits: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add a chunk: of_logits [chunk, rows], x [chunk, n_embd], weight [rows, n_embd], all in one type."""
        self.of_x[chunk] = torch.mm(of_logits, weight)
        if not self._trains_weight:
            return
        if self.of_weight is None:
            self.of_weight = self._product(of_logits, x)
        elif x.dtype == torch.float32:
            self.of_weight.addmm_(of_logits.t(), x)
        else:
            self.of_weight.add_(self._product(of_logits, x))

    def _product(self, of_logits: Tensor, x: Tensor) -> Tensor:
        """Multiply and downscale in the product's own precision, before rounding."""
        if self.fp16_downscale == 1:
            return torch.mm(of_logits.t(), x)
        product = torch.empty(of_logits.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
        return product.addmm_(of_logits.t(), x, beta=0, alpha=1 / self.fp16_downscale)


class _LossBuffers(NamedTuple):
    """Results of one chunk beside the gradients."""

    losses: Tensor
    """[tokens], fp32."""
    z: Tensor | None
    """[tokens], fp32; None without a z-loss."""
    log_probs: Tensor
    """[tokens of one softmax, rows], fp32: overwritten by each part of the chunk."""
    ignored: Tensor | None
    """[tokens], True for positions that do not count; None if all do."""


def _run_chunk(
    chunk: slice,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    inputs: _LossInputs,
    buffers: _LossBuffers,
    gradients: _Gradients | None,
) -> None:
    """Compute the losses of a chunk of positions, their z with a z-loss, and their share of the gradients."""
    part = x[chunk].to(inputs.dtype)
    # All rows, padding too: a product as wide as the vocabulary may not be a multiple of what tensor cores need.
    logits = torch.mm(part, weight.t())
    cross_entropy = _fused if inputs.settings.kernel == "liger" else _unfused
    cross_entropy(logits, targets, inputs, buffers)
    if buffers.ignored is not None:
        buffers.losses.masked_fill_(buffers.ignored, 0)
        if buffers.z is not None:
            buffers.z.masked_fill_(buffers.ignored, 0)
        if gradients is not None:
            logits.masked_fill_(buffers.ignored[:, None], 0)
    if gradients is not None:
        gradients.add(chunk, logits, part, weight)


def _unfused(logits: Tensor, targets: Tensor, inputs: _LossInputs, buffers: _LossBuffers) -> None:
    """Fill the losses [tokens], and z [tokens] with a z-loss, from logits [tokens, rows].

    Gradients of the losses' sum, if requested, overwrite the logits. The softmax is taken of a few tokens at a time,
    because in fp32 it is twice as large as logits in 16 bit.
    """
    target = targets[:, None]
    with_z = buffers.z is not None
    logits[:, inputs.vocab_size :] = -torch.inf
    of_target = torch.empty_like(target, dtype=torch.float32)
    if with_z:
        z = logits.gather(1, target).float()
    else:
        z = of_target
    factor = torch.empty_like(of_target)
    for start in range(0, len(logits), len(buffers.log_probs)):
        part = slice(start, start + len(buffers.log_probs))
        log_probs = buffers.log_probs[: len(target[part])]
        torch.log_softmax(logits[part], 1, dtype=torch.float32, out=log_probs)
        torch.gather(log_probs, 1, target[part], out=of_target[part])
        if with_z:
            z[part].sub_(of_target[part])
        if not inputs.wants_gradients:
            continue
        # softmax - onehot overwrites the logits.
        if with_z:
            # d z^2 / d logits = 2 z softmax
            torch.mul(z[part], 2 * inputs.settings.z_loss, out=factor[part]).add_(1)
            torch.mul(log_probs.exp_(), factor[part], out=logits[part])
        else:
            torch.exp(log_probs, out=logits[part])
    torch.neg(of_target[:, 0], out=buffers.losses)
    if buffers.z is not None:
        buffers.z.copy_(z[:, 0])
    if inputs.wants_gradients:
        # The target's is taken in fp32, because softmax - 1 may nearly cancel.
        at_target = of_target.expm1()
        if with_z:
            at_target = at_target + (factor - 1) * of_target.exp()
        logits.scatter_(1, target, at_target.to(inputs.dtype))


def _fused(logits: Tensor, targets: Tensor, inputs: _LossInputs, buffers: _LossBuffers) -> None:
    """Do the same as `_unfused` in Liger's kernel, without an fp32 copy of the logits; z holds only magnitudes."""
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

    z_loss = inputs.settings.z_loss
    liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        weight_ptr=None,
        loss_ptr=buffers.losses,
        z_loss_ptr=buffers.z,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=inputs.vocab_size,
        n_non_ignore=len(logits),
        sum_non_ignore_weight=len(logits),
        weight_sum=0.0,
        # Matches no id: what does not count is cleared afterwards.
        ignore_index=-1,
        lse_square_scale=z_loss,
        label_smoothing=0.0,
        reduction="sum",
        softcap=None,
        RETURN_Z_LOSS=buffers.z is not None,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(_MAX_BLOCK, 1 << (inputs.vocab_size - 1).bit_length()),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=inputs.wants_gradients,
        num_warps=_WARPS,
    )
    logits[:, inputs.vocab_size :] = 0
    if buffers.z is not None:
        # The kernel writes z_loss z^2, and includes it in the loss.
        buffers.losses.sub_(buffers.z)
        buffers.z.div_(z_loss).sqrt_()
