"""GPT-2/GPT-3. Knows nothing of ranks, ZeRO or precision: those are applied from outside."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.errors import DataError
from llmscale.model.block import Block
from llmscale.model.head import TiedHead
from llmscale.model.layers import Embedding

#: Runs one block on [batch, t, n_embd] and recomputes it in the backward pass, to keep fewer activations.
BlockCheckpoint = Callable[[nn.Module, Tensor], Tensor]


class GPT(nn.Module):
    """A decoder with learned positions and an output head tied to the token table.

    The weights are a function of (shape, seed) alone; the global random state is neither read nor moved.
    `checkpoint` runs the blocks wherever gradients are wanted; without it every activation is kept.
    """

    def __init__(self, shape: GPTShape, *, seed: int, checkpoint: BlockCheckpoint | None = None) -> None:
        super().__init__()
        self.shape, self.checkpoint = shape, checkpoint
        generator = torch.Generator().manual_seed(seed)
        self.wte = Embedding(shape.padded_vocab_size, shape.n_embd, generator)
        self.wpe = Embedding(shape.seq_len, shape.n_embd, generator)
        self.blocks = nn.ModuleList(Block(shape, generator) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.head = TiedHead(self.wte, shape.vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss where `targets` are given.

        tokens, targets: integers [batch, t] with t <= seq_len. Returns logits [batch, t, vocab_size] in the
        model's precision, or the mean cross-entropy over all positions in nats, a scalar in fp32. The padding
        rows of the token table take part in neither. Raises DataError when t exceeds seq_len.
        """
        t = tokens.shape[1]
        if t > self.shape.seq_len:
            raise DataError(
                f"a sequence of {t} tokens is longer than the model's {self.shape.seq_len} positions "
                "(seq_len). Cut the sequences, or train a model with a longer seq_len."
            )
        positions = torch.arange(t, device=tokens.device)
        x = F.dropout(self.wte(tokens) + self.wpe(positions), self.shape.dropout, self.training)
        checkpoint = self.checkpoint if torch.is_grad_enabled() else None
        for block in self.blocks:
            x = block(x) if checkpoint is None else checkpoint(block, x)
        result: Tensor = self.head(self.ln_f(x), targets)
        return result
