"""Parameter and FLOP counts against the real module and against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from llmscale.architecture.shape import VOCAB_MULTIPLE, GPTShape
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT

GPT2 = GPTShape(12, 12, 768, 50257, 1024)


def count_parameters(shape: GPTShape) -> int:
    with torch.device("meta"):
        model = GPT(shape, seed=0)
    return sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=25, deadline=None)
@given(
    n_layer=st.integers(1, 4),
    n_head=st.integers(1, 4),
    head_dim=st.integers(1, 16),
    vocab_size=st.integers(1, 700),
    seq_len=st.integers(1, 64),
    bias=st.booleans(),
)
def test_num_parameters_is_the_module_s(
    n_layer: int, n_head: int, head_dim: int, vocab_size: int, seq_len: int, bias: bool
) -> None:
    shape = GPTShape(n_layer, n_head, n_head * head_dim, vocab_size, seq_len, bias=bias)
    assert shape.num_parameters == count_parameters(shape)
    assert shape.head_dim == head_dim


def test_gpt2_has_the_published_parameters_plus_the_padding_rows() -> None:
    assert GPT2.padded_vocab_size == 50304
    assert GPT2.num_parameters - (50304 - 50257) * 768 == 124_439_808
    assert GPT2.num_parameters == count_parameters(GPT2)


def test_flops_per_token_by_hand() -> None:
    # One block of width 2 on 4 positions and 128 ids: matrices 12 x 4, biases and norms 13 x 2, final norm 4,
    # table 128 x 2, positions 4 x 2. Positions are added, not multiplied.
    shape = GPTShape(1, 1, 2, 128, 4)
    assert shape.num_parameters == 48 + 26 + 4 + 256 + 8
    assert shape.flops_per_token == 6 * (48 + 26 + 4 + 256) + 12 * 1 * 2 * 4
    # GPT-2 124M: 6 x (124,475,904 - 1024 x 768) + 12 x 12 x 768 x 1024.
    assert GPT2.flops_per_token == 6 * 123_689_472 + 113_246_208


MODERN = {"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True}
VARIANTS = [
    GPTShape(2, 4, 32, 128, 16),
    GPTShape(2, 4, 32, 256, 24, n_kv_head=2, mlp_width=40, tied=False, qk_norm="head", **MODERN),
    GPTShape(2, 4, 32, 128, 16, norm_placement="post", qk_norm="width", **MODERN),
]


@pytest.mark.parametrize("shape", VARIANTS)
def test_flops_are_those_that_torch_counts(shape: GPTShape) -> None:
    """Torch counts matrix products and attention, without the causal half taken off, as we do."""
    model, tokens = GPT(shape, seed=0), torch.zeros(3, shape.seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counted, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counted.get_total_flops() == 3 * tokens.numel() * shape.architecture.work.flops(shape.seq_len)


@pytest.mark.parametrize("shape", VARIANTS)
def test_gradients_come_in_the_described_order(shape: GPTShape) -> None:
    model, tokens = GPT(shape, seed=0), torch.zeros(1, shape.seq_len, dtype=torch.long)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    model(tokens, tokens).backward()
    assert arrived == [tensor.name for layer in shape.tensors.gradient_order for tensor in layer]


@given(st.integers(1, 200_000))
def test_padding_reaches_the_next_multiple_and_no_further(vocab_size: int) -> None:
    padded = GPTShape(1, 1, 1, vocab_size, 1).padded_vocab_size
    assert padded % VOCAB_MULTIPLE == 0
    assert 0 <= padded - vocab_size < VOCAB_MULTIPLE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 0}, "n_layer must be at least 1, not 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, not -1"),
        ({"dropout": 1.0}, "dropout must be below 1, not 1.0"),
        ({"n_head": 1 << 40, "head_dim": 2, "n_kv_head": 3}, f"n_kv_head 3 does not divide n_head {1 << 40}"),
        ({"head_dim": -2}, "head_dim must be at least 1, not -2"),
        ({"n_head": 5}, "or give head_dim"),
        ({"sliding_window": -1}, "sliding_window must be at least 0, not -1"),
        ({"window_pattern": "GL"}, "window_pattern GL has no effect without a window"),
        ({"window_pattern": "LX", "sliding_window": 8}, "window_pattern 'LX' is not legal"),
        ({"window_pattern": "G", "sliding_window": 8}, "an L is needed"),
        ({"norm_eps": 0.0}, "norm_eps must be a number above 0, not 0.0"),
        ({"norm_eps": 2.0}, "norm_eps must be at most 1, not 2.0"),
        ({"rope_theta": math.nan}, "rope_theta must be a number above 0, not nan"),
        *[
            ({"rope_scaling": text}, f"rope_scaling '{text}' is not legal. Legal: none, linear:FACTOR, llama3:")
            for text in ("yarn:0.5,8192", "linear:1e9", "llama3:8,1,4,0", "")
        ],
    ],
)
def test_impossible_shapes_are_refused(change: dict, words: str) -> None:
    values = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "seq_len": 1024, **change}
    with pytest.raises(ConfigError) as raised:
        GPTShape(**values)
    assert words in str(raised.value)


def test_a_window_pattern_is_kept_in_its_shortest_form() -> None:
    def pattern(text: str, n_layer: int) -> str:
        return GPTShape(n_layer, 2, 8, 100, 64, sliding_window=16, window_pattern=text).window_pattern

    texts = ("L", "LLL", "GLGL", "LLLLLG", "GLGLGLGLLL")
    assert [pattern(text, 6) for text in texts] == ["L", "L", "GL", "LLLLLG", "GL"]
    assert pattern("LLG", 2) == "L"


def test_descriptions_that_give_experts_to_the_same_blocks_are_one_shape() -> None:
    shapes: dict[tuple[int, tuple[int, ...]], set[tuple[int, int]]] = {}
    for n_layer, dense, interval in itertools.product(range(1, 8), range(8), range(1, 9)):
        if dense + interval <= n_layer:
            shape = GPTShape(
                n_layer, 2, 16, 64, 8, bias=False, num_experts=2, dense_layers=dense, expert_interval=interval
            )
            sparse = tuple(block for block in range(n_layer) if (block - dense + 1) % interval == 0 and block >= dense)
            assert tuple(filter(shape.is_sparse, range(n_layer))) == sparse
            shapes.setdefault((n_layer, sparse), set()).add((shape.dense_layers, shape.expert_interval))
    assert all(len(descriptions) == 1 for descriptions in shapes.values())
    assert shapes[3, (2,)] == {(2, 1)}


def test_flops_count_the_window_in_local_layers_alone() -> None:
    dense, banded = (GPTShape(6, 2, 8, 100, 64, **more) for more in ({}, {"sliding_window": 16}))
    gemma3 = dataclasses.replace(banded, window_pattern="LLLLLG")
    assert dense.flops_per_token - banded.flops_per_token == 12 * 6 * 8 * (64 - 16)
    assert gemma3.flops_per_token - banded.flops_per_token == 12 * 8 * (64 - 16)


QWEN3 = PRESETS["qwen3-0.6b"].shape(1000, 64)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"n_layer": 2}, {"n_layer": 2}),
        ({"n_embd": 512}, {"n_embd": 512, "head_dim": 32, "mlp_width": 1536}),
        ({"n_embd": 100, "n_head": 2}, {"n_embd": 100, "n_head": 2, "n_kv_head": 1, "head_dim": 50, "mlp_width": 300}),
        ({"n_head": 8, "n_kv_head": 8}, {"n_head": 8, "n_kv_head": 8, "head_dim": 128}),
        ({"n_head": 5, "head_dim": 4}, {"n_head": 5, "n_kv_head": 5, "head_dim": 4}),
        ({"n_embd": 2048, "mlp_width": 7}, {"n_embd": 2048, "head_dim": 128, "mlp_width": 7}),
        ({"bias": True}, {"bias": True, "attention_bias": "all", "mlp_bias": True}),
        ({"bias": True, "mlp_bias": False}, {"bias": True, "attention_bias": "all", "mlp_bias": False}),
    ],
)
def test_what_follows_from_a_changed_field_follows_again(given: Mapping, expected: Mapping) -> None:
    """And all the rest stays."""
    changed = QWEN3.changed(given)
    fields = dataclasses.asdict(QWEN3)
    assert dataclasses.asdict(changed) == {**fields, **expected}


def test_rope_scaling_has_one_spelling() -> None:
    spelled = ["linear:4.0", "linear:04", "llama3:8.0,1,4.00,08192", "none", "linear:1.1", "yarn:4.0,08192"]
    read = [GPTShape(1, 1, 2, 3, 4, rope_scaling=text).rope_scaling for text in spelled]
    assert read == ["linear:4", "linear:4", "llama3:8,1,4,8192", "none", "linear:1.1", "yarn:4,8192"]


@settings(max_examples=60, deadline=None)
@given(
    shared=st.integers(1, 3),
    n_kv_head=st.integers(1, 3),
    head_dim=st.integers(1, 5).map(lambda half: 2 * half),
    n_embd=st.integers(1, 20),
    mlp_width=st.integers(1, 30),
    vocab_size=st.integers(1, 300),
    block=st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "gated_mlp": st.booleans(),
            "tied": st.booleans(),
            "mlp_bias": st.booleans(),
            "norm": st.sampled_from(["layernorm", "rmsnorm"]),
            "norm_placement": st.sampled_from(["pre", "post"]),
            "positions": st.sampled_from(["learned", "rotary"]),
            "sliding_window": st.integers(0, 9),
            "qk_norm": st.sampled_from(["none", "head", "width"]),
            "activation": st.sampled_from(["silu", "relu"]),
            "attention_bias": st.sampled_from(["none", "qkv", "all"]),
        }
    ),
)
def test_any_combination_of_layers_is_a_model(
    shared: int, n_kv_head: int, head_dim: int, n_embd: int, mlp_width: int, vocab_size: int, block: dict
) -> None:
    """Its tensors are those of the description, in their order, and it trains: every parameter gets a gradient."""
    widths = {"n_kv_head": n_kv_head, "head_dim": head_dim, "mlp_width": mlp_width}
    shape = GPTShape(2, shared * n_kv_head, n_embd, vocab_size, 8, **widths, **block)
    model = GPT(shape, seed=0)
    described = {tensor.name: tensor.parameter.shape for tensor in shape.tensors.all}
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == described
    assert list(described) == [name for name, _ in model.named_parameters()]
    tokens = torch.zeros(2, 7, dtype=torch.long)
    loss = model(tokens, tokens)
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, value in model.named_parameters() if value.grad is None] == []
