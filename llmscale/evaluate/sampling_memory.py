"""Estimate the memory for sampling a batch of texts, before it begins."""

from __future__ import annotations

from llmscale.architecture.shape import GPTShape
from llmscale.engine.device_memory import free_memory_bytes
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import format_size
from llmscale.model.attention_context import kv_cache_bytes

_FP32_BYTES = 4


def check_memory(shape: GPTShape, batch: int, prompt_len: int, max_new_tokens: int, *, use_cache: bool) -> None:
    """Refuse a batch that does not fit the free memory of this machine's GPU, or of its host. Raises ConfigError."""
    needed = batch_bytes(shape, batch, prompt_len, max_new_tokens, use_cache=use_cache)
    free = free_memory_bytes()
    if needed > free:
        without = ", or keep no keys and values (--no-cache)" if use_cache else ""
        raise ConfigError(
            f"{batch:,} texts at once of up to {prompt_len + max_new_tokens:,} tokens need {format_size(needed)} of "
            f"memory, and {format_size(free)} are free. Give fewer at once (--batch-size) or shorter ones "
            f"(--max-new-tokens){without}."
        )


def batch_bytes(shape: GPTShape, batch: int, prompt_len: int, max_new_tokens: int, *, use_cache: bool) -> int:
    """Return a lower bound in bytes: the cache, and one block's activations of the tokens computed together.

    These are the prompts' tokens, or all that the model sees if a text exceeds seq_len or nothing is cached.
    """
    longest = min(prompt_len + max_new_tokens, shape.seq_len)
    outgrows = prompt_len + max_new_tokens > shape.seq_len
    together = batch * (prompt_len if use_cache and not outgrows else longest)
    hidden = shape.mlp_width * (3 if shape.gated_mlp else 2)
    widest = 2 * shape.n_embd + max(hidden, 2 * shape.qkv_heads * shape.head_dim)
    kept = kv_cache_bytes(shape, batch, longest, _FP32_BYTES) if use_cache else 0
    return kept + together * widest * _FP32_BYTES
