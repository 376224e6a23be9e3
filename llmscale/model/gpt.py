"""The GPT that every shape describes. Knows nothing of ranks, ZeRO or precision: those are applied from outside."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import DEFAULT_LOSS, LossSettings
from llmscale.errors import DataError
from llmscale.model.attention_context import AttentionContext, build_context, compute_dtype, positions_in_documents
from llmscale.model.block import Block
from llmscale.model.head import OutputHead, TiedHead
from llmscale.model.kv_cache import KVCache, Places
from llmscale.model.layers import Embedding, build_norm


class BlockCheckpoint(Protocol):
    """Runs one block on [batch, t, n_embd] and recomputes it in the backward pass, to keep fewer activations."""

    def __call__(self, block: nn.Module, x: Tensor, *context: object) -> Tensor:
        """`context`: further arguments of the block, without gradients."""


class GPT(nn.Module):
    """A decoder: token embedding, equal blocks, final norm, output head.

    The weights are a function of (shape, seed) alone; the global random state is neither read nor moved.
    `checkpoint` runs the blocks wherever gradients are wanted; without it every activation is kept.
    """

    def __init__(
        self,
        shape: GPTShape,
        *,
        seed: int,
        checkpoint: BlockCheckpoint | None = None,
        loss: LossSettings = DEFAULT_LOSS,
    ) -> None:
        super().__init__()
        self.shape, self.checkpoint = shape, checkpoint
        generator = torch.Generator().manual_seed(seed)
        self.wte = Embedding(shape.padded_vocab_size, shape.n_embd, generator)
        if shape.positions == "learned":
            self.wpe = Embedding(shape.seq_len, shape.n_embd, generator)
        self.blocks = nn.ModuleList(Block(shape, generator) for _ in range(shape.n_layer))
        self.ln_f = build_norm(shape)
        self.head = TiedHead(self.wte, shape.vocab_size, loss) if shape.tied else OutputHead(shape, generator, loss)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        each_token: bool = False,
        cache: KVCache | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the loss where `targets` are given.

        tokens, targets: integers [batch, t] with t <= seq_len. Returns logits [batch, t, vocab_size] in the
        model's precision, or the mean cross-entropy over all positions in nats, a scalar in fp32; with `each_token`
        every target's log-probability and whether it is the likeliest, [batch, t, 2] (model/token_scores.py). The
        padding rows of the token table take part in none of them.

        Tokens continue the sequences in `cache`, which keeps them, at the positions behind each one's end. With `at`,
        integers [batch], only the logits at that place of each row of `tokens` are computed: [batch, 1, vocab_size].
        Raises DataError when t, or what the cache holds and t, exceed seq_len.
        """
        t = tokens.shape[1]
        if t > self.shape.seq_len:
            raise DataError(
                f"a sequence of {t} tokens is longer than the model's {self.shape.seq_len} positions "
                "(seq_len). Cut the sequences, or train a model with a longer seq_len."
            )
        places = cache.next_places(tokens) if cache is not None else None
        if places is not None:
            positions = places.positions
        elif self.shape.document_end is not None:
            positions = positions_in_documents(tokens, self.shape.document_end)
        else:
            positions = torch.arange(t, device=tokens.device)
        x = self.wte(tokens)
        if self.shape.positions == "learned":
            x = x + self.wpe(positions)
        x = F.dropout(x, self.shape.dropout, self.training)
        context = build_context(self.shape, positions, compute_dtype(x))
        if cache is not None and places is not None:
            x = self._continue(x, replace(context, mask=places.mask), cache, places)
        else:
            checkpoint = self.checkpoint if torch.is_grad_enabled() else None
            for block in self.blocks:
                x = block(x, context) if checkpoint is None else checkpoint(block, x, context)
        if at is not None:
            x = x[torch.arange(len(at), device=x.device), at][:, None]
        if targets is not None:
            loss: Tensor = self.head(self.ln_f(x), targets, each_token=each_token)
            return loss
        logits: Tensor = self.head(self.ln_f(x))
        return logits

    def _continue(self, x: Tensor, context: AttentionContext, cache: KVCache, places: Places) -> Tensor:
        """All blocks on [batch, t, n_embd], for whose tokens the cache has `places`."""
        for layer, block in enumerate(self.blocks):
            x = block(x, context, partial(cache.append, layer, places.slots))
        cache.lengths = [length + x.shape[1] for length in cache.lengths]
        return x
