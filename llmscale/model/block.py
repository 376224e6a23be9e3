"""One transformer block: pre-norm causal self-attention and a two-layer MLP (Radford et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import Activation, GPTShape
from llmscale.model.initialization import residual_std
from llmscale.model.layers import Linear


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The MLP's non-linearity, element by element."""
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.dropout = shape.n_head, shape.head_dim, shape.dropout
        width = shape.n_embd
        # One matrix product for q, k and v of all heads: columns are [q | k | v], each of them head by head.
        self.qkv = Linear(width, 3 * width, generator, bias=shape.bias)
        self.proj = Linear(width, width, generator, bias=shape.bias, std=residual_std(shape.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]."""
        batch, t, width = x.shape
        qkv = self.qkv(x).view(batch, t, 3, self.n_head, self.head_dim)
        # Taken apart before they are transposed: the other way round the backward pass copies [batch, t, 3 width] more.
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each [batch, n_head, t, head_dim]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(batch, t, width)), self.dropout, self.training)


class MLP(nn.Module):
    """Up to 4 x n_embd, non-linearity, down again."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.activation, self.dropout = shape.activation, shape.dropout
        width, hidden = shape.n_embd, shape.mlp_width
        self.up = Linear(width, hidden, generator, bias=shape.bias)
        self.down = Linear(hidden, width, generator, bias=shape.bias, std=residual_std(shape.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]."""
        return F.dropout(self.down(activate(self.up(x), self.activation)), self.dropout, self.training)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the residual stream itself is never normalised."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.attn = CausalSelfAttention(shape, generator)
        self.ln_2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = MLP(shape, generator)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))
