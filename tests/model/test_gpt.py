from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.errors import DataError
from llmscale.model.attention_context import AttentionContext
from llmscale.model.gpt import GPT, CausalSelfAttention
from llmscale.model.layers import Linear, activate

SMALL = GPTShape(n_layer=2, n_head=4, n_embd=64, vocab_size=300, seq_len=32)


def random_batch(shape: GPTShape, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    window = torch.randint(shape.vocab_size, (batch, shape.seq_len + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


def test_loss_starts_at_the_entropy_of_a_uniform_guess() -> None:
    shape = PRESETS["tiny-1m"].shape(50257)
    loss = GPT(shape, seed=0)(*random_batch(shape, batch=1))
    assert loss.item() == pytest.approx(math.log(50257), abs=0.1)


def test_overfits_one_batch() -> None:
    model = GPT(SMALL, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    batch = random_batch(SMALL)
    for _ in range(120):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_has_the_parameters_that_its_shape_says(preset) -> None:
    shape = preset.shape(50257)
    with torch.device("meta"):
        model = GPT(shape, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters


def test_names_are_those_that_checkpoints_hold() -> None:
    names = set(GPT(SMALL, seed=0).state_dict())
    block = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.up", "mlp.down")
    modules = [f"blocks.{layer}.{part}" for layer in range(2) for part in block] + ["ln_f"]
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    assert names == expected | {"wte.weight", "wpe.weight"}


def test_state_dict_round_trip_keeps_the_head_tied() -> None:
    source, target = GPT(SMALL, seed=0), GPT(SMALL, seed=1)
    target.load_state_dict(source.state_dict())
    tokens, _ = random_batch(SMALL)
    assert torch.equal(source(tokens), target(tokens))
    assert target.head.weight is target.wte.weight


def test_loss_is_the_cross_entropy_of_the_real_vocabulary() -> None:
    model = GPT(SMALL, seed=0)
    tokens, targets = random_batch(SMALL)
    logits, loss = model(tokens), model(tokens, targets)
    assert logits.shape == (4, 32, 300)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.view(-1, 300), targets.reshape(-1)).item())


def test_padding_rows_change_nothing_and_learn_nothing() -> None:
    model = GPT(SMALL, seed=0)
    batch = random_batch(SMALL)
    before = model(*batch)
    with torch.no_grad():
        model.wte.weight[SMALL.vocab_size :] = 1e4
    after = model(*batch)
    after.backward()
    assert torch.equal(before, after)
    assert not model.wte.weight.grad[SMALL.vocab_size :].any()
    assert model.wte.weight.grad[: SMALL.vocab_size].any(dim=1).all()


def test_a_position_sees_nothing_after_it() -> None:
    model = GPT(SMALL, seed=0)
    tokens, _ = random_batch(SMALL)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % SMALL.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(DataError, match=r"33 tokens is longer than the model's 32 positions \(seq_len\)"):
        GPT(SMALL, seed=0)(torch.zeros(1, 33, dtype=torch.long))


def test_dropout_works_in_training_only() -> None:
    model = GPT(GPTShape(2, 4, 64, 300, 32, dropout=0.2), seed=0)
    plain = GPT(SMALL, seed=0)
    tokens, _ = random_batch(SMALL)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))


def test_checkpoint_runs_every_block_where_gradients_are_wanted() -> None:
    seen: list[torch.nn.Module] = []

    def checkpoint(block: torch.nn.Module, x: torch.Tensor, *context: object) -> torch.Tensor:
        seen.append(block)
        return block(x, *context)

    model = GPT(SMALL, seed=0, checkpoint=checkpoint)
    tokens, _ = random_batch(SMALL)
    logits = model(tokens)
    assert seen == list(model.blocks)
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)
    assert len(seen) == 2


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


def test_activations_are_those_of_their_papers() -> None:
    x = torch.linspace(-3, 3, 61)
    exact = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(activate(x, "gelu"), exact, atol=1e-6)
    assert torch.allclose(activate(x, "gelu_tanh"), tanh, atol=1e-6)
    assert torch.equal(activate(x, "relu"), x.clamp(min=0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [(5, 8), (2, 3, 5, 8)])
def test_linear_is_a_product_over_the_last_dimension(dims: tuple[int, ...], bias: bool) -> None:
    layer = Linear(8, 6, torch.Generator().manual_seed(0), bias=bias)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(dims)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-6)
