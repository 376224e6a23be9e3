"""A decoder that llmscale does not have: RMS norm, gated MLP, fewer key-value heads, an untied head.

It knows nothing of memory, and no line of llmscale knows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.model.gpt import BlockCheckpoint


@dataclass(frozen=True)
class ToyShape:
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    seq_len: int

    @property
    def n_embd(self) -> int:
        return self.n_head * self.head_dim

    @property
    def num_parameters(self) -> int:
        h, kv = self.n_embd, self.n_kv_head * self.head_dim
        block = 2 * h + 2 * h * h + 2 * h * kv + 3 * h * self.mlp_width
        return self.n_layer * block + 2 * self.vocab_size * h + h


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class ToyBlock(nn.Module):
    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv = shape.n_embd, shape.n_kv_head * shape.head_dim
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in (width, kv, kv))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor) -> Tensor:
        batch, t, width = x.shape
        q, k, v = (f(x).view(batch, t, -1, self.shape.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        shared = self.shape.n_head // self.shape.n_kv_head
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, t, width))


class ToyDecoder(nn.Module):
    def __init__(self, shape: ToyShape, run_block: BlockCheckpoint) -> None:
        super().__init__()
        self.run_block = run_block
        self.embedding = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.blocks = nn.ModuleList(ToyBlock(shape) for _ in range(shape.n_layer))
        self.norm = RMSNorm(shape.n_embd)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.head(self.norm(x).flatten(0, 1))
        return F.cross_entropy(logits.float(), targets.flatten())


#: (sequences, shape): no two products of the symbols grow alike.
SMALL = (
    (2, ToyShape(2, 6, 3, 104, 211, 307, 37)),
    (3, ToyShape(2, 10, 2, 40, 503, 997, 150)),
    (7, ToyShape(2, 28, 7, 136, 811, 2111, 290)),
)

#: Llama 3 8B's, with fewer blocks so that the direct run is quick.
LARGE = replace(ToyShape(32, 32, 8, 128, 14336, 128256, 8192), n_layer=5)
