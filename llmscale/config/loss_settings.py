"""How the training loss is computed. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossKernel = Literal["torch", "liger"]

#: Half as many would halve the logits, and pass twice as often over the sum of the head's gradient.
CHUNK_TOKENS = 2048

#: Parts of a chunk whose softmax, in fp32, is taken one after the other: of all it is twice as large as the logits.
_SOFTMAX_PARTS = 16


@dataclass(frozen=True)
class LossSettings:
    """Of the output head's loss."""

    chunk_tokens: int = CHUNK_TOKENS
    """Tokens of a micro-batch whose logits exist at a time."""
    z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits; 0: none."""
    kernel: LossKernel = "torch"
    """What makes a chunk's losses and gradients of its logits: torch's operations, or Liger Kernel's one."""


DEFAULT_LOSS = LossSettings()


def softmax_tokens(chunk_tokens: int) -> int:
    """Tokens of a chunk whose logits exist in fp32 at a time."""
    return -(-chunk_tokens // _SOFTMAX_PARTS)
