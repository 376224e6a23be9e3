from __future__ import annotations

import math

import torch

from llmscale.architecture.shape import GPTShape
from llmscale.model.attention_context import AttentionContext
from llmscale.model.gpt import Block, CausalSelfAttention, activate

SHAPE = GPTShape(n_layer=2, n_head=4, n_embd=32, vocab_size=10, seq_len=16)


def test_attention_is_softmax_over_the_past_head_by_head() -> None:
    attention = CausalSelfAttention(SHAPE, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(attention.qkv.weight)
    x = torch.randn(2, 7, 32)
    q, k, v = (x @ attention.qkv.weight.t() + attention.qkv.bias).split(32, dim=-1)
    heads = []
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    expected = torch.cat(heads, -1) @ attention.proj.weight.t() + attention.proj.bias
    assert torch.allclose(attention(x, AttentionContext()), expected, atol=1e-5)


def test_block_adds_to_the_residual_stream() -> None:
    block = Block(SHAPE, torch.Generator().manual_seed(0))
    x = torch.randn(2, 7, 32)
    torch.nn.init.zeros_(block.attn.proj.weight)
    torch.nn.init.zeros_(block.mlp.down.weight)
    assert torch.equal(block(x, AttentionContext()), x)


def test_block_without_biases_has_none() -> None:
    shape = GPTShape(2, 4, 32, 10, 16, bias=False)
    names = [name for name, _ in Block(shape, torch.Generator()).named_parameters()]
    assert len(names) == 6
    assert not any(name.endswith("bias") for name in names)


def test_activations_are_those_of_their_papers() -> None:
    x = torch.linspace(-3, 3, 61)
    exact = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(activate(x, "gelu"), exact, atol=1e-6)
    assert torch.allclose(activate(x, "gelu_tanh"), tanh, atol=1e-6)
    assert torch.equal(activate(x, "relu"), x.clamp(min=0))
