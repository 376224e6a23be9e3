"""Settings of the training loss. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossKernel = Literal["torch", "liger"]

#: Half of this would halve the logits, but double the passes over the head's gradient.
CHUNK_TOKENS = 2048

#: Weight of the balance loss in Switch Transformer, and speed of the routers' biases in DeepSeek V3.
BALANCE_LOSS = 0.01
ROUTER_BIAS_SPEED = 0.001

#: Parts of a chunk for which the fp32 softmax is computed one after the other; it is twice as large as the logits.
_SOFTMAX_PARTS = 16


@dataclass(frozen=True)
class LossSettings:
    """Settings of the output head's loss, and of the routers' balance."""

    chunk_tokens: int = CHUNK_TOKENS
    """Tokens of a micro-batch whose logits exist at a time."""
    z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits; 0: off."""
    kernel: LossKernel = "torch"
    """Implementation of a chunk's loss and gradient: torch's operations, or Liger Kernel's fused kernel."""
    balance_loss: float = 0.0
    """Weight of the loss that balances the experts' load (Fedus et al. 2021, equation 4), per block with experts."""
    router_z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of a router's logits (Zoph et al. 2022, equation 5)."""
    router_bias_speed: float = 0.0
    """Change of the routers' biases in a step."""

    @property
    def has_router_loss(self) -> bool:
        """True when a loss gives routers gradients beside that of the head."""
        return bool(self.balance_loss or self.router_z_loss)


DEFAULT_LOSS = LossSettings()


def softmax_tokens(chunk_tokens: int) -> int:
    """Tokens of a chunk whose logits exist in fp32 at a time."""
    return -(-chunk_tokens // _SOFTMAX_PARTS)
