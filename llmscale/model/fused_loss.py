"""The cross-entropy of one chunk's logits by Liger Kernel's Triton kernel (Hsu et al. 2024), which reads them twice and
holds no copy of them in fp32. Sums over chunks and scaling stay those of `loss.py`."""

from __future__ import annotations

import os

from torch import Tensor

from llmscale.config.bundled_files import install_command
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
