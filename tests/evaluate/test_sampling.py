from __future__ import annotations

from collections import Counter

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError
from llmscale.evaluate.sampling import sample
from llmscale.model.gpt import GPT

SHAPE = GPTShape(n_layer=2, n_head=2, n_embd=32, vocab_size=300, seq_len=16)
PROMPT = torch.tensor([5, 17, 250])
GREEDY = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 0, "eot_token": None}
RANDOM = GREEDY | {"temperature": 1.0}


@pytest.fixture(scope="module")
def model() -> GPT:
    """Random weights, spread out so that tokens differ in likelihood."""
    model = GPT(SHAPE, seed=0)
    with torch.no_grad():
        model.wte.weight.mul_(10)
        model.wpe.weight.mul_(50)
    return model


class Fixed(torch.nn.Module):
    """Says the same probabilities whatever came before."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.shape = GPTShape(1, 1, 1, len(probabilities), 16)
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def test_temperature_zero_takes_the_likeliest_over_a_sliding_window(model: GPT) -> None:
    context = PROMPT.tolist()
    for _ in range(30):
        window = torch.tensor([context[-SHAPE.seq_len :]])
        context.append(int(model(window)[0, -1].argmax()))
    assert list(sample(model, PROMPT, max_new_tokens=30, **GREEDY)) == context[3:]
    assert len(set(context[3:])) > 3


def test_prompt_longer_than_the_window_is_cropped(model: GPT) -> None:
    long = torch.arange(40)
    cropped = sample(model, long[-16:], max_new_tokens=5, **GREEDY)
    assert list(sample(model, long, max_new_tokens=5, **GREEDY)) == list(cropped)


def test_the_seed_decides_and_the_global_random_state_stays(model: GPT) -> None:
    state = torch.get_rng_state()
    first, second, other = (
        list(sample(model, PROMPT, max_new_tokens=20, **(RANDOM | {"seed": seed}))) for seed in (1, 1, 2)
    )
    assert first == second != other
    assert torch.equal(state, torch.get_rng_state())


def draw(probabilities: list[float], **settings: object) -> dict[int, float]:
    prompt = torch.tensor([0])
    drawn = list(sample(Fixed(probabilities), prompt, max_new_tokens=4000, **(RANDOM | settings)))
    return {token: count / 4000 for token, count in Counter(drawn).items()}


def test_tokens_come_as_often_as_the_model_says() -> None:
    assert draw([0.1, 0.6, 0.3]) == pytest.approx({0: 0.1, 1: 0.6, 2: 0.3}, abs=0.03)


def test_temperature_sharpens() -> None:
    # 0.25^2 : 0.75^2 is 1 : 9
    assert draw([0.25, 0.75], temperature=0.5) == pytest.approx({0: 0.1, 1: 0.9}, abs=0.03)


def test_top_k_leaves_the_likeliest() -> None:
    assert draw([0.1, 0.3, 0.0, 0.6], top_k=2) == pytest.approx({3: 2 / 3, 1: 1 / 3}, abs=0.03)
    assert draw([0.1, 0.3, 0.6], top_k=1) == {2: 1.0}
    assert set(draw([0.1, 0.3, 0.6], top_k=50)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.01, {2}), (0.5, {2}), (0.55, {2, 1}), (0.9, {2, 1, 0}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_leaves_the_fewest_that_reach_it(top_p: float, left: set[int]) -> None:
    assert set(draw([0.15, 0.25, 0.53, 0.07], top_p=top_p)) == left


def test_ends_before_end_of_text(model: GPT) -> None:
    tokens = list(sample(model, PROMPT, max_new_tokens=30, **GREEDY))
    stop = tokens[4]
    ended = list(sample(model, PROMPT, max_new_tokens=30, **(GREEDY | {"eot_token": stop})))
    assert ended == tokens[: tokens.index(stop)]


def test_dropout_is_off_and_the_mode_is_put_back() -> None:
    dropping = GPT(GPTShape(2, 2, 32, 300, 16, dropout=0.5), seed=0)
    plain = GPT(SHAPE, seed=0)
    tokens = list(sample(dropping, PROMPT, max_new_tokens=10, **GREEDY))
    assert dropping.training
    assert tokens == list(sample(plain, PROMPT, max_new_tokens=10, **GREEDY))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, r"temperature must be 0 .* or a positive number, not -0.5"),
        ({"temperature": float("nan")}, r"temperature must be 0 .* not nan"),
        ({"top_k": 0}, r"top_k must be at least 1 .* not 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\] .* not 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\] .* not 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, not -1"),
        ({"prompt_ids": torch.tensor([], dtype=torch.long)}, "prompt has no tokens"),
        ({"prompt_ids": torch.tensor([1, 300])}, "token 300, and the model's vocabulary is 0 to 299"),
        ({"prompt_ids": torch.tensor([-1, 2])}, "token -1, and"),
    ],
)
def test_illegal_values_are_refused_at_the_call(model: GPT, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(model, **({"prompt_ids": PROMPT, "max_new_tokens": 5} | RANDOM | settings))
