from __future__ import annotations

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError
from llmscale.evaluate.sampling_memory import batch_bytes, check_memory
from llmscale.model.attention_context import kv_cache_bytes

SHAPE = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50_257, seq_len=1 << 20)


def test_a_batch_that_memory_cannot_hold_is_refused_with_its_size() -> None:
    check_memory(SHAPE, 8, 100, 200, use_cache=True)
    said = r"1,024 texts at once of up to 1,000,100 tokens need .* GiB of memory, and .* are free\. .*--batch-size"
    with pytest.raises(ConfigError, match=said):
        check_memory(SHAPE, 1024, 100, 10**6, use_cache=True)


def test_a_cache_takes_memory_and_spares_that_of_the_prompt() -> None:
    kept = kv_cache_bytes(SHAPE, 8, 1100, 4)
    assert batch_bytes(SHAPE, 8, 100, 1000, use_cache=True) > kept
    assert batch_bytes(SHAPE, 8, 100, 1000, use_cache=False) < kept
    # All that the model sees is computed again once a text has outgrown it.
    short = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50_257, seq_len=512)
    assert batch_bytes(short, 8, 100, 1000, use_cache=True) > kv_cache_bytes(short, 8, 512, 4) + batch_bytes(
        short, 8, 100, 300, use_cache=False
    )
