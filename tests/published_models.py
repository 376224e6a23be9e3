"""Folders as transformers publishes them: tiny random models of every family."""

from __future__ import annotations

from pathlib import Path

import torch

from llmscale.evaluate.transformers_package import import_transformers

#: Rows for the `bytes` tokenizer's tokens and a few more, as published tables have.
VOCAB_SIZE = 260
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 16},
    "qwen2": {**_LLAMA, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "head_dim": 16},
    "olmo2": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "dots1": {
        **_LLAMA,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
}


def save_model(folder: Path, model_type: str, shard_size: str = "5GB", **config: object) -> torch.nn.Module:
    """A model with random weights everywhere, norms and biases included, saved to `folder`; in eval mode."""
    transformers = import_transformers()
    settings = {**CONFIGS[model_type], "vocab_size": VOCAB_SIZE, **config}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            about = 1.0 if "norm" in name or "ln_" in name else 0.0
            tensor.copy_(about + 0.1 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()
