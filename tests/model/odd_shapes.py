"""One small model of every kind of block, with sizes that are no powers of two."""

from __future__ import annotations

import torch

from llmscale.architecture.shape import GPTShape
from llmscale.model.gpt import GPT

_LLAMA = {
    "activation": "silu",
    "bias": False,
    "gated_mlp": True,
    "mlp_width": 72,
    "norm": "rmsnorm",
    "positions": "rotary",
    "n_kv_head": 2,
    "vocab_size": 300,
    "seq_len": 24,
}
ODD_SHAPES = {
    "gpt2": GPTShape(n_layer=2, n_head=2, n_embd=32, vocab_size=300, seq_len=16, activation="gelu_tanh"),
    "opt": GPTShape(n_layer=3, n_head=3, n_embd=48, vocab_size=300, seq_len=20, activation="relu"),
    "llama3": GPTShape(2, 6, 48, rope_scaling="llama3:8.0,1.0,4.0,8", rope_theta=500_000.0, tied=False, **_LLAMA),
    "mistral": GPTShape(2, 4, 40, head_dim=14, sliding_window=5, rope_scaling="linear:2.0", **_LLAMA),
    "qwen2": GPTShape(2, 4, 40, attention_bias="qkv", **_LLAMA),
    "qwen3": GPTShape(2, 6, 48, head_dim=10, qk_norm="head", **_LLAMA),
    "olmo2": GPTShape(2, 4, 40, qk_norm="width", norm_placement="post", tied=False, **_LLAMA),
    "gpt2-documents": GPTShape(2, 2, 32, 300, 16, document_end=11),
    "alternating": GPTShape(3, 4, 40, sliding_window=5, window_pattern="GL", **_LLAMA),
    "alternating-documents": GPTShape(2, 4, 40, sliding_window=5, window_pattern="LG", document_end=11, **_LLAMA),
    "mistral-documents": GPTShape(2, 4, 40, head_dim=14, sliding_window=5, document_end=11, **_LLAMA),
}


def build_spread_gpt(shape: GPTShape) -> GPT:
    """Random weights, spread out so that tokens differ in likelihood and by what came before them."""
    model = GPT(shape, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
            else:
                parameter.mul_(10)
    return model.eval()
