"""The training loss of a linear head, some tokens at a time: the logits of one chunk are all that ever exist, and the
softmax in fp32 of a part of them.

The gradients of the hidden states and of the head's weights are made in the forward pass, while a chunk's logits are
there; the backward pass only multiplies them by what comes from above. The matrix products are the same three as
without chunks. Liger Kernel (Hsu et al. 2024) does so too; this differs in what training in 16 bit depends on: the
weights' gradient is summed over chunks in fp32, and divided by the number of tokens only in the backward pass, together
with the product with the loss scale, which in fp16 would else come too late.
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

#: Logits of a row that one program holds; a power of two, as Liger has it.
_MAX_BLOCK = 32768
#: As Liger measured on Hopper and before; fewer help on Blackwell in 16 bit, which this leaves out.
_WARPS = 32


def check_fused_loss(device_type: str) -> None:
    """Raises ConfigError where the kernel is not installed or has no GPU; Triton's interpreter needs none."""
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


def fused_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    z_loss: float,
    losses: Tensor,
    z_magnitudes: Tensor | None,
    *,
    wants_gradients: bool,
) -> None:
    """Fill losses [tokens] in fp32, nats, and the magnitudes of z, the log-sum-exp [tokens], where they are wanted.

    logits [tokens, rows] of which the first `vocab_size` count, targets [tokens]. With gradients they take the logits'
    place, of the losses' sum plus z_loss x z^2; those of the rows behind `vocab_size` are 0.
    """
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

    with_z = z_magnitudes is not None
    liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=z_magnitudes,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=vocab_size,
        n_non_ignore=len(logits),
        sum_non_ignore_weight=len(logits),
        weight_sum=0.0,
        # No id is: documents are packed, and every position has a target.
        ignore_index=-1,
        lse_square_scale=z_loss,
        label_smoothing=0.0,
        reduction="sum",
        softcap=None,
        RETURN_Z_LOSS=with_z,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(_MAX_BLOCK, 1 << (vocab_size - 1).bit_length()),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=wants_gradients,
        num_warps=_WARPS,
    )
    logits[:, vocab_size:] = 0
    if z_magnitudes is not None:
        # The kernel gives z_loss z^2, and has it in the loss.
        losses.sub_(z_magnitudes)
        z_magnitudes.div_(z_loss).sqrt_()


@dataclass(frozen=True)
class _Job:
    vocab_size: int
    settings: LossSettings
    dtype: torch.dtype
    """Of the matrix products."""
    wants_gradients: bool
    wants_each: bool


class Losses(NamedTuple):
    """Of one micro-batch, in fp32."""

    mean: Tensor
    """Cross-entropy in nats per token: a scalar, the one that has gradients."""
    mean_z_squared: Tensor | None
    """A scalar; None without a z-loss."""
    of_sequences: Tensor | None
    """Cross-entropy in nats per token of each sequence [batch]; None where it was not asked for."""


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    settings: LossSettings,
    *,
    each_sequence: bool = False,
) -> Losses:
    """Mean cross-entropy in nats of softmax(x weight^T) over all positions, and with a z-loss the mean of z^2.

    x: [..., n_embd]; weight: [rows, n_embd], of which those from `vocab_size` on are padding without logits; targets:
    ids [...]. z is the log-sum-exp of a position's logits. A z-loss (PaLM, Chowdhery et al. 2022, section 5; ST-MoE,
    Zoph et al. 2022, equation 5) is in the gradients and not in the value, so that losses with and without it compare:
    the first result's gradients are those of cross-entropy + settings.z_loss x mean z^2.
    """
    device = x.device.type
    job = _Job(
        vocab_size,
        settings,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype,
        # Asked here: within a Function grad mode is off.
        torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
        each_sequence,
    )
    with torch.autocast(device, enabled=False):
        loss, z_squared, each = _ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten(), job)
    return Losses(loss, z_squared, None if each is None else each.view(targets.shape).mean(1))


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    weight_dtype: torch.dtype
    times_too_small: float


class _ChunkedCrossEntropy(torch.autograd.Function):
    """x [tokens, n_embd], weight [rows, n_embd], targets [tokens] -> two scalars, and where they are wanted the losses
    [tokens], in fp32."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor, targets: Tensor, job: _Job
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens, chunk_tokens = len(x), job.settings.chunk_tokens
        losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
        z = torch.empty_like(losses) if job.settings.z_loss else None
        # Liger's kernel has no need of it.
        at_once = 0 if job.settings.kernel == "liger" else softmax_tokens(min(tokens, chunk_tokens))
        log_probs = torch.empty(at_once, len(weight), dtype=torch.float32, device=x.device)
        weight_cast = weight.to(job.dtype)
        gradients = _Gradients(x, weight_cast, chunk_tokens) if job.wants_gradients else None
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, tokens))
            made = _Made(losses[chunk], None if z is None else z[chunk], log_probs)
            _run_chunk(chunk, x, weight_cast, targets[chunk], job, made, gradients)
        if gradients is not None:
            ctx.weight_dtype, ctx.times_too_small = weight.dtype, gradients.times_too_small
            ctx.save_for_backward(gradients.of_x, gradients.of_weight)
        z_squared = None if z is None else z.square().mean()
        each = losses if job.wants_each else None
        ctx.mark_non_differentiable(*(tensor for tensor in (z_squared, each) if tensor is not None))
        return losses.mean(), z_squared, each

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor, *_: object) -> tuple[Tensor, Tensor, None, None]:
        of_x, of_weight = ctx.saved_tensors
        # [1] and not a scalar, which would be rounded to 16 bit first: products are taken in fp32 and rounded once.
        scale = (gradient / len(of_x)).reshape(1)
        x_gradient = torch.mul(of_x, scale, out=torch.empty_like(of_x))
        weight_gradient = torch.mul(
            of_weight, scale.mul_(ctx.times_too_small), out=torch.empty_like(of_weight, dtype=ctx.weight_dtype)
        )
        return x_gradient, weight_gradient, None, None


class _Gradients:
    """Of the summed loss: of_x [tokens, n_embd] in x's type, of_weight [rows, n_embd] summed over chunks in fp32."""

    of_weight: Tensor
    """Too small by `times_too_small`."""

    def __init__(self, x: Tensor, weight: Tensor, chunk_tokens: int) -> None:
        self.of_x = torch.empty_like(x)
        self._is_one_chunk = len(x) <= chunk_tokens
        # The sum over a chunk's tokens would leave the range of fp16 before it is divided by their number, whatever the
        # loss scale: where all tokens have one target it is as large as the chunk. A power of two costs no digits.
        is_fp16 = weight.dtype == torch.float16
        self.times_too_small = 2.0 ** max(0, min(len(x), chunk_tokens).bit_length() - 6) if is_fp16 else 1.0
        if not self._is_one_chunk:
            self.of_weight = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, chunk: slice, of_logits: Tensor, x: Tensor, weight: Tensor) -> None:
        """of_logits: [chunk, rows], x: [chunk, n_embd], weight: [rows, n_embd], all in one type."""
        self.of_x[chunk] = torch.mm(of_logits, weight)
        if self._is_one_chunk:
            self.of_weight = self._product(of_logits, x)
        elif x.dtype == torch.float32:
            self.of_weight.addmm_(of_logits.t(), x)
        else:
            self.of_weight.add_(self._product(of_logits, x))

    def _product(self, of_logits: Tensor, x: Tensor) -> Tensor:
        """Made smaller where it is still in the product's own precision, before it is rounded."""
        if self.times_too_small == 1:
            return torch.mm(of_logits.t(), x)
        product = torch.empty(of_logits.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
        return product.addmm_(of_logits.t(), x, beta=0, alpha=1 / self.times_too_small)


class _Made(NamedTuple):
    """What a chunk's logits are turned into, beside their gradients."""

    losses: Tensor
    """[tokens], fp32."""
    z: Tensor | None
    """[tokens], fp32; None without a z-loss."""
    log_probs: Tensor
    """[tokens whose softmax is taken at once, rows], fp32: overwritten by each such part of the chunk."""


def _run_chunk(
    chunk: slice, x: Tensor, weight: Tensor, targets: Tensor, job: _Job, made: _Made, gradients: _Gradients | None
) -> None:
    """The losses of some positions, their z where there is a z-loss, and their share of the gradients."""
    part = x[chunk].to(job.dtype)
    # Whole rows, padding too: a product as wide as the vocabulary alone may be no multiple of what tensor cores take.
    logits = torch.mm(part, weight.t())
    cross_entropy = _fused if job.settings.kernel == "liger" else _unfused
    cross_entropy(logits, targets, job, made)
    if gradients is not None:
        gradients.add(chunk, logits, part, weight)


def _fused(logits: Tensor, targets: Tensor, job: _Job, made: _Made) -> None:
    """As `_unfused` does, in one kernel; the magnitudes of z, which is all that its square needs."""
    fused_cross_entropy(
        *(logits, targets, job.vocab_size, job.settings.z_loss, made.losses, made.z),
        wants_gradients=job.wants_gradients,
    )


def _unfused(logits: Tensor, targets: Tensor, job: _Job, made: _Made) -> None:
    """Fill losses [tokens], and z [tokens] where there is a z-loss. Gradients of the losses' sum, if wanted, take
    the logits' place [tokens, rows].

    The softmax is taken of a few tokens at a time: in fp32 it is twice as large as logits in 16 bit.
    """
    target, with_z = targets[:, None], made.z is not None
    logits[:, job.vocab_size :] = -torch.inf
    of_target = torch.empty_like(target, dtype=torch.float32)
    z = logits.gather(1, target).float() if with_z else of_target
    factor = torch.empty_like(of_target)
    for start in range(0, len(logits), len(made.log_probs)):
        part = slice(start, start + len(made.log_probs))
        log_probs = made.log_probs[: len(target[part])]
        torch.log_softmax(logits[part], 1, dtype=torch.float32, out=log_probs)
        torch.gather(log_probs, 1, target[part], out=of_target[part])
        if with_z:
            z[part].sub_(of_target[part])
        if not job.wants_gradients:
            continue
        # softmax - onehot takes the place of the logits.
        if with_z:
            # d z^2 / d logits = 2 z softmax
            torch.mul(z[part], 2 * job.settings.z_loss, out=factor[part]).add_(1)
            torch.mul(log_probs.exp_(), factor[part], out=logits[part])
        else:
            torch.exp(log_probs, out=logits[part])
    torch.neg(of_target[:, 0], out=made.losses)
    if made.z is not None:
        made.z.copy_(z[:, 0])
    if job.wants_gradients:
        # The target's is taken in fp32, where little may be left of it.
        at_target = of_target.expm1()
        at_target = at_target + (factor - 1) * of_target.exp() if with_z else at_target
        logits.scatter_(1, target, at_target.to(job.dtype))


def score_tokens(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk_tokens: int) -> Tensor:
    """Of every target its log-probability in nats, and 1 where it is the likeliest token, else 0: [batch, t, 2], fp32.

    x: [batch, t, n_embd]; weight: [rows, n_embd], of which those from `vocab_size` on are padding without logits;
    targets: ids [batch, t]. Without gradients. Of equally likely tokens the first is the likeliest. The logits of
    `chunk_tokens` positions are in memory at a time, as in a validation (model/loss.py), whose arithmetic this is.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    flat, of_flat = x.flatten(0, -2), targets.flatten()
    scores = torch.empty(len(flat), 2, dtype=torch.float32, device=x.device)
    with torch.no_grad(), torch.autocast(device, enabled=False):
        weight_cast = weight.to(dtype)
        for start in range(0, len(flat), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            target = of_flat[chunk]
            logits = torch.mm(flat[chunk].to(dtype), weight_cast.t())
            logits[:, vocab_size:] = -torch.inf
            scores[chunk, 1] = (logits.argmax(1) == target).float()
            log_probs = F.log_softmax(logits, 1, dtype=torch.float32)
            scores[chunk, 0] = log_probs.gather(1, target[:, None])[:, 0]
    return scores.view(*targets.shape, 2)
