"""From the residual stream to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.model.initialization import INIT_STD, fill_normal_
from llmscale.model.layers import Embedding


class _Head(nn.Module):
    def __init__(self, weight: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.weight, self.vocab_size = weight, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> logits [batch, t, vocab_size] in x's precision, without the padding rows: a view."""
        return F.linear(x, self.weight)[..., : self.vocab_size]


class OutputHead(_Head):
    """A head with weights of its own, [padded_vocab_size, n_embd] as the token embedding."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        weight = nn.Parameter(torch.empty(shape.padded_vocab_size, shape.n_embd))
        super().__init__(weight, shape.vocab_size)
        fill_normal_(self.weight, INIT_STD, generator)


class TiedHead(_Head):
    """The output head: a product with the token embedding, which stays that module's parameter.

    A module of its own, because ZeRO-3 gathers a sharded parameter when a module that owns it runs. It stays out of
    state dicts: the weights are there under the embedding's name.
    """

    def __init__(self, embedding: Embedding, vocab_size: int) -> None:
        super().__init__(embedding.weight, vocab_size)

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        """Nothing to save."""

    def _load_from_state_dict(self, *_: object) -> None:
        """Nothing to load."""
