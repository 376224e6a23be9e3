from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmscale.architecture.shape import GPTShape
from llmscale.errors import DataError
from llmscale.model import attention_context, gpt
from llmscale.model.attention_context import KVCache, build_contexts, kv_cache_bytes, positions_in_documents
from llmscale.model.gpt import GPT
from tests.model.odd_shapes import ODD_SHAPES, build_spread_gpt

END = 7
GPT2_LIKE = GPTShape(2, 4, 32, vocab_size=40, seq_len=24, document_end=END)
LLAMA_LIKE = replace(
    GPT2_LIKE,
    n_kv_head=2,
    gated_mlp=True,
    activation="silu",
    norm="rmsnorm",
    positions="rotary",
    bias=False,
    attention_bias="none",
    mlp_bias=False,
    tied=False,
)
SHAPES = {
    "gpt2": GPT2_LIKE,
    "llama": LLAMA_LIKE,
    "llama, long context": replace(LLAMA_LIKE, rope_scaling="llama3:8,1,4,16"),
    "mistral": replace(LLAMA_LIKE, sliding_window=3),
    "qwen3": replace(LLAMA_LIKE, qk_norm="head", head_dim=6),
    "olmo2": replace(LLAMA_LIKE, norm_placement="post", qk_norm="width"),
}
#: Where ends of documents stand in a sequence of 24.
ENDS = {
    "at the beginning": [0, 9],
    "in a row": [4, 5, 6, 17],
    "nowhere": [],
    "at the end": [11, 23],
    "all over": list(range(24)),
    "cut at both ends": [8, 15],
}


def packed_tokens(seed: int = 0) -> Tensor:
    """A row [24] for each of ENDS."""
    tokens = torch.randint(END + 1, 40, (len(ENDS), 24), generator=torch.Generator().manual_seed(seed))
    for row, ends in zip(tokens, ENDS.values(), strict=True):
        row[ends] = END
    return tokens


def documents_of(row: Tensor) -> list[slice]:
    """The documents of a sequence [t], their ends included."""
    ends = [index + 1 for index, token in enumerate(row.tolist()) if token == END]
    bounds = [0, *ends] if ends and ends[-1] == len(row) else [0, *ends, len(row)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def test_positions_begin_anew_behind_each_end() -> None:
    tokens = torch.tensor([[3, 4, END, 5, END, END, 6, 8], [END, 1, 2, 3, 4, 5, 6, END]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert positions_in_documents(tokens, END).tolist() == expected


@pytest.mark.parametrize("t", [1, 8, 24])
@pytest.mark.parametrize("window", [0, 3])
def test_mask_is_what_its_words_say(t: int, window: int) -> None:
    tokens = packed_tokens()[:, :t]
    shape = replace(GPT2_LIKE, sliding_window=window)
    mask = build_contexts(shape, positions_in_documents(tokens, END), torch.float32).local.mask
    assert mask is not None
    for row, seen in zip(tokens, mask[:, 0] == 0.0, strict=True):
        documents = documents_of(row)
        for query in range(t):
            document = next(document for document in documents if document.start <= query < document.stop)
            first = max(document.start, query - window + 1) if window else document.start
            assert seen[query].nonzero().flatten().tolist() == list(range(first, query + 1))
    assert torch.all((mask == 0.0) | (mask == -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_documents", [True, False])
def test_mask_is_as_kernels_take_it(dtype: torch.dtype, of_documents: bool) -> None:
    """Else each block would convert or pad it, and keep its copy for the backward pass."""
    shape = replace(GPT2_LIKE, sliding_window=5)
    tokens = packed_tokens()[:, :21]
    positions = positions_in_documents(tokens, END) if of_documents else torch.arange(21)
    mask = build_contexts(shape, positions, dtype).local.mask
    assert mask is not None
    assert mask.dtype == dtype
    assert mask.shape == ((len(ENDS), 1, 21, 21) if of_documents else (21, 21))
    assert mask.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed_documents_equal_each_alone(shape: GPTShape, dtype: torch.dtype, tolerance: float) -> None:
    tokens, targets = packed_tokens(), packed_tokens(seed=1)
    packed, alone = (GPT(shape, seed=0).to(dtype) for shape in (shape, replace(shape, document_end=None)))
    for model in (packed, alone):
        stir(model)
    logits = packed(tokens)
    summed_loss(logits, targets).backward()
    for row, row_targets, row_logits in zip(tokens, targets, logits, strict=True):
        for document in documents_of(row):
            logits_alone = alone(row[None, document])
            torch.testing.assert_close(row_logits[None, document], logits_alone, atol=tolerance, rtol=tolerance)
            summed_loss(logits_alone, row_targets[None, document]).backward()
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(ours.grad, theirs.grad, atol=tolerance, rtol=tolerance, msg=message)


def test_long_documents_equal_each_alone() -> None:
    """Longer than the blocks in which kernels go through the keys: whole blocks of them are out of sight."""
    shape = replace(LLAMA_LIKE, seq_len=1400)
    tokens = torch.randint(END + 1, 40, (1, 1400), generator=torch.Generator().manual_seed(2))
    tokens[0, [699, 1299]] = END
    logits = GPT(shape, seed=0)(tokens)
    alone = GPT(replace(shape, document_end=None), seed=0)
    parts = [alone(tokens[:, first:last]) for first, last in ((0, 700), (700, 1300), (1300, 1400))]
    torch.testing.assert_close(logits, torch.cat(parts, dim=1), atol=1e-5, rtol=0)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits [batch, t, vocab_size], divided by the tokens of `packed_tokens`, in the precision of the logits."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (24 * len(ENDS))


def stir(model: GPT) -> None:
    """Weights five times as large as they begin, so that attention is far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "wte" not in name:
                parameter.mul_(5)


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
            complete = model(tokens[row : row + 1, : end + t])[0, end:]
            torch.testing.assert_close(logits[row], complete, atol=1e-5, rtol=1e-5)
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


@torch.no_grad()
def test_a_cache_is_of_the_precision_of_its_keys() -> None:
    shape = ODD_SHAPES["qwen3"]
    model, tokens = build_spread_gpt(shape).bfloat16(), random_tokens(shape, 2, 12)
    cache = KVCache(shape, 2, 12)
    logits = torch.cat([model(tokens[:, :11], cache=cache), model(tokens[:, 11:], cache=cache)], dim=1)
    complete = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits - complete).abs().mean() < 0.02 * complete.abs().mean()


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
    remaining = [tensor for pair in cache._kept if pair for tensor in pair]
    assert kv_cache_bytes(shape, 3, 17, 4) == sum(tensor.numel() * 4 for tensor in remaining)
    assert kv_cache_bytes(shape, 3, 10**6, 4) == kv_cache_bytes(shape, 3, shape.seq_len, 4)


@pytest.mark.parametrize("document_end", [None, END])
def test_each_block_has_its_own_window(document_end: int | None) -> None:
    shape = replace(LLAMA_LIKE, n_layer=3, sliding_window=3, window_pattern="LGG", document_end=document_end)
    model, tokens = GPT(shape, seed=0), packed_tokens()
    positions = torch.arange(24) if document_end is None else positions_in_documents(tokens, document_end)
    x = model.wte(tokens)
    for block, window in zip(model.blocks, (3, 0, 0), strict=True):
        of_block = replace(shape, sliding_window=window, window_pattern="L")
        x = block(x, build_contexts(of_block, positions, x.dtype).local)
    assert torch.equal(model(tokens), model.head(model.ln_f(x)))


def packed_row(t: int, ends: list[int]) -> Tensor:
    row = torch.full((t,), END + 1)
    row[ends] = END
    return row


@pytest.mark.parametrize("t", [100, 256, 700])
@pytest.mark.parametrize("window", [None, 1, 90, 300])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_mask_in_blocks_shows_what_the_dense_one_shows(t: int, window: int | None, seed: int | None) -> None:
    """Its function everywhere, and its tables of blocks: seen completely, in part, or not at all."""
    positions = torch.arange(t)
    if seed is not None:
        draw = random.Random(seed)
        rows = [packed_row(t, draw.sample(range(t), count)) for count in (0, 1, 7)]
        positions = positions_in_documents(torch.stack(rows), END)
    mask = attention_context._block_mask(positions, window)
    dense = attention_context._attention_mask(positions, window, torch.float32)
    if dense is None:
        assert mask is None
        return
    assert mask is not None
    seen = (dense if dense.dim() == 2 else dense[:, 0]).eq(0).expand(len(dense) if dense.dim() == 4 else 1, t, t)
    batch, index = torch.arange(len(seen)), torch.arange(t)
    visible = mask.mask_mod(batch[:, None, None], torch.tensor(0), index[:, None], index)
    assert torch.equal(visible.expand_as(seen), seen)
    blocks = -(-t // 128)
    for row in range(len(seen)):
        for i in range(blocks):
            partial = mask.kv_indices[row, 0, i, : mask.kv_num_blocks[row, 0, i]].tolist()
            complete = mask.full_kv_indices[row, 0, i, : mask.full_kv_num_blocks[row, 0, i]].tolist()
            for j in range(blocks):
                part = seen[row, 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
                expected = "whole" if j in complete else "partial" if j in partial else "none"
                assert not (j in complete and j in partial)
                assert part.all() if expected == "whole" else part.any() == (expected == "partial"), (i, j, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pattern", ["L", "LG"])
@pytest.mark.parametrize("window", [0, 40])
def test_flex_attention_computes_what_dense_masks_do(
    window: int, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared key-value heads, in bf16 as on a GPU, in a forward pass: a CPU has no backward pass of it."""
    shape = replace(LLAMA_LIKE, seq_len=300, head_dim=16, sliding_window=window, document_end=END)
    shape = replace(shape, window_pattern=pattern) if window else shape
    tokens = torch.stack([packed_row(300, ends) for ends in ([], [17, 140, 141, 290])])
    tokens[:, 1::3] = torch.randint(END + 1, 40, tokens[:, 1::3].shape, generator=torch.Generator().manual_seed(0))
    dense, flex = (GPT(shape, seed=0, skips_blocks=skips).bfloat16() for skips in (False, True))
    calls: list[Tensor] = []
    attend = attention_context.attend_in_blocks
    monkeypatch.setattr(gpt, "has_flex_attention", lambda device: True)
    monkeypatch.setattr(attention_context, "attend_in_blocks", lambda *args: calls.append(args[0]) or attend(*args))
    with torch.no_grad():
        expected, logits = dense(tokens), flex(tokens)
    assert len(calls) == shape.n_layer
    torch.testing.assert_close(logits.float(), expected.float(), rtol=0, atol=4e-3)
    # The mask matters: without documents other logits.
    with torch.no_grad():
        other = GPT(replace(shape, document_end=None), seed=0).bfloat16()(tokens)
    assert (other - expected).abs().max() > 0.02
    # Not where lengths vary, nor with dropout, in fp32, for heads of other widths, or by request.
    assert flex.eval()._takes_blocks(300, torch.ones(1, dtype=torch.bfloat16))
    assert not flex._takes_blocks(299, torch.ones(1, dtype=torch.bfloat16))
    assert not flex._takes_blocks(300, torch.ones(1))
    for other_shape in (replace(shape, dropout=0.1), replace(shape, head_dim=24), replace(shape, document_end=None)):
        takes = GPT(other_shape, seed=0, skips_blocks=True)._takes_blocks(300, torch.ones(1, dtype=torch.bfloat16))
        assert takes == (other_shape.has_mask and other_shape.dropout == 0 and other_shape.head_dim == 16)
