"""One transformer block: causal self-attention and an MLP, each added to the residual stream (Radford et al. 2019;
Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.attention_kernels import ComputeCapability, has_flash_attention
from llmscale.architecture.shape import Activation, GPTShape
from llmscale.model.attention_context import AttentionContext
from llmscale.model.initialization import residual_std
from llmscale.model.layers import Linear, RMSNorm, build_norm

#: Keeps a layer's new keys and values [batch, t, n_kv_head, head_dim], and returns all that are kept of it so far.
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The MLP's non-linearity, element by element."""
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it; key-value heads may be shared."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        width, bias = shape.n_embd, shape.attention_bias
        # One matrix product for q, k and v of all heads: columns are [q | k | v], each of them head by head.
        self.qkv = Linear(width, shape.qkv_heads * shape.head_dim, generator, bias=bias != "none")
        if shape.qk_norm != "none":
            of_q, of_k = (shape.n_head, shape.n_kv_head) if shape.qk_norm == "width" else (1, 1)
            self.q_norm = RMSNorm(of_q * shape.head_dim, shape.norm_eps)
            self.k_norm = RMSNorm(of_k * shape.head_dim, shape.norm_eps)
        inner, std = shape.n_head * shape.head_dim, residual_std(shape.n_layer)
        self.proj = Linear(inner, width, generator, bias=bias == "all", std=std)

    def forward(self, x: Tensor, context: AttentionContext, remember: Remember | None = None) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]; with `remember`, x continues what was kept."""
        shape = self.shape
        qkv = self.qkv(x).unflatten(-1, (shape.qkv_heads, shape.head_dim))
        # Taken apart before they are transposed: the other way round the backward pass copies all of qkv once more.
        q, k, v = qkv.split((shape.n_head, shape.n_kv_head, shape.n_kv_head), dim=2)  # each [batch, t, heads, head_dim]
        if shape.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        elif shape.qk_norm == "width":
            q, k = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
        # Autocast norms in fp32: what follows is computed in the type of v.
        q, k = context.rotate(q.type_as(v)), context.rotate(k.type_as(v))
        if remember is not None:
            k, v = remember(k, v)
        y = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context.mask)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), shape.dropout, self.training)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k^T) v over [batch, heads, t, head_dim]; without a mask, causal, or one query that sees all."""
        shared = self.shape.n_head // self.shape.n_kv_head
        # Of CUDA's kernels FlashAttention alone shares key-value heads, in 16 bit and without a mask; the others would
        # fall back to scores [t, t] (sdp_utils.cpp, check_batch_size_and_num_heads_dense).
        dropout = self.shape.dropout if self.training else 0.0
        is_native = mask is None and has_flash_attention(
            q.shape[-1],
            is_16bit=q.dtype in (torch.float16, torch.bfloat16),
            drops_out=dropout > 0,
            capability=device_capability(q.device),
        )
        if shared > 1 and not is_native:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=dropout,
            is_causal=mask is None and q.shape[2] == k.shape[2],
            enable_gqa=shared > 1 and is_native,
        )


def device_capability(device: torch.device) -> ComputeCapability | None:
    """Of a GPU; None of anything else. What a dry run simulates it says in the place of this
    (llmscale.dry_run.cuda_kernels)."""
    if device.type != "cuda":
        return None
    # Not get_device_capability, at which torch.compile's graph would break.
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


class MLP(nn.Module):
    """Up to mlp_width, non-linearity, down again."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.activation, self.dropout, self.is_gated = shape.activation, shape.dropout, shape.gated_mlp
        width, hidden, bias = shape.n_embd, shape.mlp_width, bool(shape.mlp_bias)
        # One matrix product for gate and up, columns [gate | up].
        self.up = Linear(width, 2 * hidden if self.is_gated else hidden, generator, bias=bias)
        self.down = Linear(hidden, width, generator, bias=bias, std=residual_std(shape.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]."""
        return F.dropout(self.down(self._hidden(x)), self.dropout, self.training)

    def _hidden(self, x: Tensor) -> Tensor:
        """[batch, t, mlp_width]. A function of its own: nothing in it outlives the product that reads its result."""
        if not self.is_gated:
            return activate(self.up(x), self.activation)
        gate, up = self.up(x).chunk(2, dim=-1)
        return activate(gate, self.activation) * up


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or x + norm(attention(x)), then x + norm(mlp(x)): the residual
    stream itself is never normalised."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.is_pre = shape.norm_placement == "pre"
        self.ln_1 = build_norm(shape)
        self.attn = CausalSelfAttention(shape, generator)
        self.ln_2 = build_norm(shape)
        self.mlp = MLP(shape, generator)

    def forward(self, x: Tensor, context: AttentionContext, remember: Remember | None = None) -> Tensor:
        """[batch, t, n_embd] -> [batch, t, n_embd]; with `remember`, x continues what was kept."""
        if self.is_pre:
            x = x + self.attn(self.ln_1(x), context, remember)
            return x + self.mlp(self.ln_2(x))
        x = x + self.ln_1(self.attn(x, context, remember))
        return x + self.ln_2(self.mlp(x))
