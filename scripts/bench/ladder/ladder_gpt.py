"""The lower rungs of ladder.py: the GPT-2 that one writes first, with a switch for each improvement.

Filled with the weights of a `llmscale.model.gpt.GPT` it has the same loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import DEFAULT_LOSS
from llmscale.model.gpt import GPT
from llmscale.model.loss import chunked_cross_entropy


@dataclass(frozen=True)
class Ways:
    """Improvements of the loop and its model over the first attempt."""

    one_product: bool = False
    """One matrix product for q, k and v of all heads, and attention over all heads at once."""
    fused_attention: bool = False
    bf16: bool = False
    """Autocast: products in bf16, weights in fp32."""
    reads_loss_every: int = 1
    """Steps between reads of the loss, which make the host wait for a GPU."""
    zero_to_none: bool = False
    fused_adamw: bool = False
    chunked_loss: bool = False


class NaiveAttention(nn.Module):
    """Causal self-attention with a linear layer per head for each of q, k, v, or one layer for all."""

    def __init__(self, shape: GPTShape, ways: Ways) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.ways = shape.n_head, shape.head_dim, ways
        width = shape.n_embd
        if ways.one_product:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.heads = nn.ModuleList(nn.Linear(width, shape.head_dim) for _ in range(3 * shape.n_head))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]."""
        if not self.ways.one_product:
            q, k, v = (self.heads[part * self.n_head : (part + 1) * self.n_head] for part in range(3))
            heads = [self._attend(q[n](x), k[n](x), v[n](x)) for n in range(self.n_head)]
            return self.proj(torch.cat(heads, dim=-1))
        parts = self.qkv(x).split(x.shape[-1], dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_head, self.head_dim)).transpose(1, 2) for part in parts)
        return self.proj(self._attend(q, k, v).transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax(q k^T) v over [..., t, head_dim]."""
        if self.ways.fused_attention:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        return F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v


class NaiveBlock(nn.Module):
    def __init__(self, shape: GPTShape, ways: Ways) -> None:
        super().__init__()
        width = shape.n_embd
        self.ln_1, self.attn = nn.LayerNorm(width), NaiveAttention(shape, ways)
        self.ln_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]."""
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class NaiveGPT(nn.Module):
    """GPT-2: learned positions, layer norms and biases everywhere, the token embedding as output head."""

    def __init__(self, shape: GPTShape, ways: Ways) -> None:
        super().__init__()
        self.vocab_size, self.ways = shape.vocab_size, ways
        self.wte, self.wpe = nn.Embedding(shape.vocab_size, shape.n_embd), nn.Embedding(shape.seq_len, shape.n_embd)
        self.blocks = nn.ModuleList(NaiveBlock(shape, ways) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.n_embd)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats over ids [batch, t], a scalar."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if self.ways.chunked_loss:
            return chunked_cross_entropy(x, self.wte.weight, targets, self.vocab_size, DEFAULT_LOSS)[0]
        logits = F.linear(x, self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def train_step(self, tokens: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """Train a step on ids [batch, t + 1]; return the loss as a tensor."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.ways.bf16):
            loss = self(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.ways.zero_to_none)
        return loss.detach()

    def build_optimizer(self, learning_rate: float, *, is_gpu: bool) -> torch.optim.Optimizer:
        """Return AdamW with torch's default kernel of the device, or with its fused kernel."""
        kernel = {"fused": True} if self.ways.fused_adamw else {"foreach": is_gpu}
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, **kernel)

    @torch.no_grad()
    def take_weights(self, product: GPT) -> None:
        """Copy the weights of the product's model of the same shape."""
        theirs = dict(product.state_dict())
        for name, mine in self.state_dict().items():
            mine.copy_(self._theirs(name, theirs, mine))

    def _theirs(self, name: str, theirs: dict[str, Tensor], mine: Tensor) -> Tensor:
        """Return the product's rows that make up the tensor `name`."""
        if ".attn.heads." in name:
            before, _, after = name.partition("heads.")
            number, _, kind = after.partition(".")
            rows = len(mine)
            return theirs[f"{before}qkv.{kind}"][int(number) * rows : (int(number) + 1) * rows]
        name = name.replace(".up.", ".mlp.up.").replace(".down.", ".mlp.down.")
        return theirs[name][: len(mine)]  # without the vocabulary's padding
