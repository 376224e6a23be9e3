from __future__ import annotations

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.errors import DataError
from llmscale.model.attention_context import KVCache, kv_cache_bytes
from tests.model.odd_shapes import ODD_SHAPES, build_spread_gpt

every_shape = pytest.mark.parametrize("shape", ODD_SHAPES.values(), ids=ODD_SHAPES.keys())


def random_tokens(shape: GPTShape, batch: int, t: int) -> torch.Tensor:
    """In the second half every fourth ends a document, where the shape knows these; so does the last row's first."""
    tokens = torch.randint(12, shape.vocab_size, (batch, t), generator=torch.Generator().manual_seed(t))
    tokens[:, t // 2 :: 4] = 11
    tokens[-1, 0] = 11
    return tokens


@every_shape
@torch.no_grad()
def test_in_pieces_of_any_length_the_logits_are_those_of_the_whole(shape: GPTShape) -> None:
    model, tokens = build_spread_gpt(shape), random_tokens(shape, 3, shape.seq_len)
    cache, begin, pieces = KVCache(shape, 3, shape.seq_len), 0, []
    for t in (7, 1, 1, 4, 2, shape.seq_len - 15):
        pieces.append(model(tokens[:, begin : begin + t], cache=cache))
        begin += t
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-5, rtol=1e-5)


@every_shape
@torch.no_grad()
def test_sequences_of_different_lengths_go_on_where_each_one_ends(shape: GPTShape) -> None:
    model, tokens = build_spread_gpt(shape), random_tokens(shape, 4, shape.seq_len)
    cache, begun = KVCache(shape, 4, shape.seq_len), [9, 1, 6, 3]
    # What stands behind a sequence's end is forgotten.
    model(tokens[:, :9], cache=cache)
    cache.lengths = list(begun)
    for t in (1, 3, 1):
        ends = cache.lengths
        more = torch.stack([row[end : end + t] for row, end in zip(tokens, ends, strict=True)])
        logits = model(more, cache=cache)
        for row, end in enumerate(ends):
            whole = model(tokens[row : row + 1, : end + t])[0, end:]
            torch.testing.assert_close(logits[row], whole, atol=1e-5, rtol=1e-5)
    assert cache.lengths == [end + 5 for end in begun]


@torch.no_grad()
def test_some_sequences_go_on_without_the_others() -> None:
    shape = ODD_SHAPES["llama3"]
    model, tokens = build_spread_gpt(shape), random_tokens(shape, 4, 12)
    cache = KVCache(shape, 4, 12)
    model(tokens[:, :10], cache=cache)
    cache.lengths = [10, 4, 7, 10]
    cache.keep([2, 0])
    assert cache.lengths == [7, 10]
    logits = model(torch.stack([tokens[2, 7:8], tokens[0, 10:11]]), cache=cache)
    torch.testing.assert_close(logits[0, 0], model(tokens[2:3, :8])[0, -1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[1, 0], model(tokens[0:1, :11])[0, -1], atol=1e-5, rtol=1e-5)


@every_shape
@torch.no_grad()
def test_logits_at_one_place_of_each_row_are_those_of_all(shape: GPTShape) -> None:
    model, tokens = build_spread_gpt(shape), random_tokens(shape, 3, 8)
    chosen = model(tokens, at=torch.tensor([7, 0, 4]))
    torch.testing.assert_close(chosen[:, 0], model(tokens)[range(3), [7, 0, 4]])


@torch.no_grad()
def test_a_cache_is_of_the_precision_of_its_keys() -> None:
    shape = ODD_SHAPES["qwen3"]
    model, tokens = build_spread_gpt(shape).bfloat16(), random_tokens(shape, 2, 12)
    cache = KVCache(shape, 2, 12)
    logits = torch.cat([model(tokens[:, :11], cache=cache), model(tokens[:, 11:], cache=cache)], dim=1)
    whole = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits - whole).abs().mean() < 0.02 * whole.abs().mean()


@torch.no_grad()
def test_a_full_cache_says_so() -> None:
    shape = ODD_SHAPES["gpt2"]
    model, cache = build_spread_gpt(shape), KVCache(shape, 1, 1000)
    model(random_tokens(shape, 1, 16), cache=cache)
    with pytest.raises(DataError, match="16 tokens and 1 more do not fit a cache of 16 positions"):
        model(random_tokens(shape, 1, 1), cache=cache)


def test_its_bytes_are_what_it_takes() -> None:
    shape = ODD_SHAPES["llama3"]
    cache = KVCache(shape, 3, 17)
    keys = torch.zeros(3, 5, shape.n_kv_head, shape.head_dim)
    for layer in range(shape.n_layer):
        cache.append(layer, torch.arange(5), keys, keys)
    kept = [tensor for pair in cache._kept if pair for tensor in pair]
    assert kv_cache_bytes(shape, 3, 17, 4) == sum(tensor.numel() * 4 for tensor in kept)
    assert kv_cache_bytes(shape, 3, 10**6, 4) == kv_cache_bytes(shape, 3, shape.seq_len, 4)
