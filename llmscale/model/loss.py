"""The training loss, from the last block's result on: what computes it another way replaces this one function."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def next_token_loss(norm: nn.Module, head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions in nats, a scalar in fp32.

    x is the residual stream [batch, t, n_embd], targets are token ids [batch, t]. The normalised stream is made here
    and not by the caller, who would hold it beside the logits.
    """
    logits = head(norm(x))
    # The head's result is a view; in 16 bit, float() is the one copy that cross-entropy in fp32 needs anyway.
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
