"""From the residual stream to logits, or to their loss."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import LossSettings
from llmscale.model.initialization import INIT_STD, fill_normal_
from llmscale.model.layers import Embedding
from llmscale.model.loss import chunked_cross_entropy
from llmscale.model.token_scores import score_tokens


class _Head(nn.Module):
    def __init__(self, weight: Tensor, vocab_size: int, loss: LossSettings) -> None:
        super().__init__()
        self.weight, self.vocab_size, self.loss = weight, vocab_size, loss
        self.mean_z_squared: Tensor | None = None
        """Of the last micro-batch that was trained on, a scalar in fp32; None without a z-loss."""
        self.sequence_losses: deque[Tensor] | None = None
        """Where somebody set one: nats per token of each sequence [batch], of the last micro-batches with targets."""

    def forward(self, x: Tensor, targets: Tensor | None = None, *, each_token: bool = False) -> Tensor:
        """[batch, t, n_embd] -> logits [batch, t, vocab_size] in x's precision, without the padding rows: a view.

        With `targets`, ids [batch, t]: their mean cross-entropy in nats, a scalar in fp32, or with `each_token` the
        scores of each, [batch, t, 2] as `score_tokens` has them. They are taken here and not by the caller, because
        ZeRO-3 holds the weights only while this module runs.
        """
        if targets is None:
            return F.linear(x, self.weight)[..., : self.vocab_size]
        if each_token:
            return score_tokens(x, self.weight, targets, self.vocab_size, self.loss.chunk_tokens)
        settings = self.loss if self.training else replace(self.loss, z_loss=0.0)
        kept = self.sequence_losses
        losses = chunked_cross_entropy(
            x, self.weight, targets, self.vocab_size, settings, each_sequence=kept is not None
        )
        if self.training:
            self.mean_z_squared = losses.mean_z_squared
        if kept is not None and losses.of_sequences is not None:
            kept.append(losses.of_sequences)
        return losses.mean


class OutputHead(_Head):
    """A head with weights of its own, [padded_vocab_size, n_embd] as the token embedding."""

    def __init__(self, shape: GPTShape, generator: torch.Generator, loss: LossSettings) -> None:
        weight = nn.Parameter(torch.empty(shape.padded_vocab_size, shape.n_embd))
        super().__init__(weight, shape.vocab_size, loss)
        fill_normal_(self.weight, INIT_STD, generator)


class TiedHead(_Head):
    """The output head: a product with the token embedding, which stays that module's parameter.

    A module of its own, because ZeRO-3 gathers a sharded parameter when a module that owns it runs. It stays out of
    state dicts: the weights are there under the embedding's name.
    """

    def __init__(self, embedding: Embedding, vocab_size: int, loss: LossSettings) -> None:
        super().__init__(embedding.weight, vocab_size, loss)

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        """Nothing to save."""

    def _load_from_state_dict(self, *_: object) -> None:
        """Nothing to load."""
