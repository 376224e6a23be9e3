"""From the last block's result to logits, or to the loss: a module of its own, so that a loss can be exchanged."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.model.layers import Embedding


class TiedHead(nn.Module):
    """The output head and its loss: a product with the token embedding, which stays that module's parameter.

    A module of its own, because ZeRO-3 gathers a sharded parameter when a module that owns it runs. It stays out of
    state dicts: the weights are there under the embedding's name.
    """

    def __init__(self, embedding: Embedding, vocab_size: int) -> None:
        super().__init__()
        self.weight, self.vocab_size = embedding.weight, vocab_size

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """[batch, t, n_embd] -> logits [batch, t, vocab_size] in x's precision; with `targets` [batch, t] the mean
        cross-entropy over all positions in nats, a scalar in fp32. Padding rows take part in neither."""
        logits = F.linear(x, self.weight)[..., : self.vocab_size]
        if targets is None:
            return logits
        # The slice is a view; in 16 bit, float() is the one copy that cross-entropy in fp32 needs anyway.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        """Nothing to save."""

    def _load_from_state_dict(self, *_: object) -> None:
        """Nothing to load."""
