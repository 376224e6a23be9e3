from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.errors import ConfigError, TrainingError
from llmscale.evaluate.generate import SamplingSettings, batch_bytes, check_memory, generate_text, sample
from llmscale.evaluate.scoring import Row, score_rows
from llmscale.model.attention_context import KVCache, kv_cache_bytes
from llmscale.model.gpt import GPT
from tests.model.odd_shapes import ODD_SHAPES, build_spread_gpt

ROOT = Path(__file__).resolve().parents[2]
SHAPE = GPTShape(n_layer=2, n_head=2, n_embd=32, vocab_size=300, seq_len=16)
PROMPT = [5, 17, 250]
SETTINGS = {"max_new_tokens": 20, "temperature": 1.0, "top_k": None, "top_p": None}


@pytest.fixture(scope="module")
def model() -> GPT:
    return build_spread_gpt(SHAPE)


def texts(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    eot: int | None = None,
    use_cache: bool = True,
    **settings: object,
) -> list[list[int]]:
    """The tokens that continue each prompt; `settings` replace SETTINGS."""
    continued: list[list[int]] = [[] for _ in prompts]
    chosen = SamplingSettings(**(SETTINGS | settings))
    for tokens in sample(model, prompts, chosen, seeds=[seed] * len(prompts), eot_token=eot, use_cache=use_cache):
        for number, token in tokens.items():
            continued[number].append(token)
    return continued


class Fixed(torch.nn.Module):
    """Says the same probabilities whatever came before."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.shape = GPTShape(1, 1, 1, len(probabilities), 16)
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, tokens: torch.Tensor, *, cache: KVCache | None, at: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(at), 1, -1)


@pytest.mark.parametrize("use_cache", [True, False])
def test_temperature_zero_takes_the_likeliest_over_a_sliding_window(model: GPT, use_cache: bool) -> None:
    context = list(PROMPT)
    for _ in range(30):
        window = torch.tensor([context[-SHAPE.seq_len :]])
        context.append(int(model(window)[0, -1].argmax()))
    assert texts(model, [PROMPT], temperature=0.0, max_new_tokens=30, use_cache=use_cache) == [context[3:]]
    assert len(set(context[3:])) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ODD_SHAPES.values(), ids=ODD_SHAPES.keys())
def test_the_same_seed_gives_the_same_text_cached_or_not_through_a_window_that_slides(
    shape: GPTShape, temperature: float
) -> None:
    model = build_spread_gpt(shape)
    prompts = [PROMPT, [7], list(range(20, 20 + shape.seq_len)), [3, 1, 4, 11, 5, 9, 2, 6], [11]]
    length = shape.seq_len + 10
    cached, plain = (
        texts(model, prompts, temperature=temperature, max_new_tokens=length, seed=3, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert cached == plain
    assert {len(text) for text in cached} == {length}
    assert len({tuple(text) for text in cached}) >= 4


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_text_does_not_depend_on_what_else_is_in_the_batch(model: GPT, use_cache: bool) -> None:
    prompts = [PROMPT, [7], list(range(14)), [3, 1, 4, 1, 5, 9, 2, 6], PROMPT]
    stop = texts(model, [PROMPT], seed=5, max_new_tokens=7)[0][6]
    settings = {"seed": 5, "eot": stop, "max_new_tokens": 40, "use_cache": use_cache}
    alone = [texts(model, [prompt], **settings)[0] for prompt in prompts]
    assert texts(model, prompts, **settings) == alone
    assert len({len(text) for text in alone}) >= 2, "no text goes on when another has ended"


def test_the_seed_decides_and_the_global_random_state_stays(model: GPT) -> None:
    state = torch.get_rng_state()
    first, second, other = (texts(model, [PROMPT], seed=seed) for seed in (1, 1, 2))
    assert first == second != other
    assert torch.equal(state, torch.get_rng_state())


def draw(probabilities: list[float], num_texts: int = 10, **settings: object) -> dict[int, float]:
    """The share of each token in texts of 40 tokens."""
    chosen = SamplingSettings(**(SETTINGS | {"max_new_tokens": 40} | settings))
    prompts, seeds = [[0]] * num_texts, range(num_texts)
    steps = sample(Fixed(probabilities), prompts, chosen, seeds=seeds, eot_token=None)  # type: ignore[arg-type]
    counts = Counter(token for tokens in steps for token in tokens.values())
    assert counts.total() == 40 * num_texts
    return {token: count / counts.total() for token, count in counts.items()}


def test_tokens_come_as_often_as_the_model_says() -> None:
    assert draw([0.1, 0.6, 0.3], 100) == pytest.approx({0: 0.1, 1: 0.6, 2: 0.3}, abs=0.03)


def test_temperature_sharpens() -> None:
    # 0.25^2 : 0.75^2 is 1 : 9
    assert draw([0.25, 0.75], 100, temperature=0.5) == pytest.approx({0: 0.1, 1: 0.9}, abs=0.03)


def test_top_k_leaves_the_likeliest() -> None:
    assert draw([0.1, 0.3, 0.0, 0.6], 100, top_k=2) == pytest.approx({3: 2 / 3, 1: 1 / 3}, abs=0.03)
    assert draw([0.1, 0.3, 0.6], top_k=1) == {2: 1.0}
    assert set(draw([0.1, 0.3, 0.6], top_k=50)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.01, {2}), (0.5, {2}), (0.55, {2, 1}), (0.9, {2, 1, 0}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_leaves_the_fewest_that_reach_it(top_p: float, left: set[int]) -> None:
    assert set(draw([0.15, 0.25, 0.53, 0.07], top_p=top_p)) == left


@pytest.mark.parametrize("use_cache", [True, False])
def test_ends_before_end_of_text(model: GPT, use_cache: bool) -> None:
    tokens = texts(model, [PROMPT], temperature=0.0, max_new_tokens=30)[0]
    stop = tokens[4]
    ended = texts(model, [PROMPT], temperature=0.0, max_new_tokens=30, eot=stop, use_cache=use_cache)
    assert ended == [tokens[: tokens.index(stop)]]


def test_dropout_is_off_and_the_mode_is_put_back() -> None:
    dropping = GPT(GPTShape(2, 2, 32, 300, 16, dropout=0.5), seed=0)
    plain = GPT(SHAPE, seed=0)
    tokens = texts(dropping, [PROMPT], temperature=0.0)
    assert dropping.training
    assert tokens == texts(plain, [PROMPT], temperature=0.0)


def test_no_plans_of_cudnn_for_lengths_that_change(model: GPT) -> None:
    is_on = list[bool]()
    hook = model.register_forward_pre_hook(lambda *_: is_on.append(torch.backends.cuda.cudnn_sdp_enabled()))
    with hook:
        texts(model, [PROMPT], max_new_tokens=2)
        score_rows(model, [Row((1, 2, 3), 2)], batch_size=1)
    assert is_on == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_ranks_go_on_with_what_they_agreed_on(model: GPT) -> None:
    steps = sample(
        model,
        [PROMPT, [7]],
        SamplingSettings(**SETTINGS),
        seeds=[0, 0],
        eot_token=299,
        agree=lambda tokens: {number: 299 if number else 40 for number in tokens},
    )
    assert list(itertools.islice(steps, 3)) == [{0: 40}] * 3


def test_lost_weights_are_named() -> None:
    with pytest.raises(TrainingError, match="logits are NaN"):
        texts(Fixed([float("nan"), 0.5]), [[0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, r"temperature must be 0 .* or a positive number, not -0.5"),
        ({"top_k": 0}, r"top_k must be at least 1 .* not 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\] .* not 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, not -1"),
    ],
)
def test_illegal_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingSettings(**(SETTINGS | settings))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt has no tokens"),
        ([1, 300], "token 300, and the model's vocabulary is 0 to 299"),
        ([0] * 17, r"has 17 tokens, and the model sees 16 \(its seq_len\)\. Give the last 16 or fewer"),
    ],
)
def test_illegal_prompts_are_refused_at_the_call(model: GPT, prompt: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(model, [PROMPT, prompt], SamplingSettings(**SETTINGS), seeds=[0, 0], eot_token=None)


LARGE_SHAPE = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50_257, seq_len=1 << 20)


def test_a_batch_that_memory_cannot_hold_is_refused_with_its_size() -> None:
    check_memory(LARGE_SHAPE, 8, 100, 200, use_cache=True)
    words = r"1,024 texts at once of up to 1,000,100 tokens need .* GiB of memory, and .* are free\. .*--batch-size"
    with pytest.raises(ConfigError, match=words):
        check_memory(LARGE_SHAPE, 1024, 100, 10**6, use_cache=True)


def test_a_cache_takes_memory_and_spares_that_of_the_prompt() -> None:
    cache_bytes = kv_cache_bytes(LARGE_SHAPE, 8, 1100, 4)
    assert batch_bytes(LARGE_SHAPE, 8, 100, 1000, use_cache=True) > cache_bytes
    assert batch_bytes(LARGE_SHAPE, 8, 100, 1000, use_cache=False) < cache_bytes
    # All that the model sees is computed again once a text has outgrown it.
    short = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50_257, seq_len=512)
    assert batch_bytes(short, 8, 100, 1000, use_cache=True) > kv_cache_bytes(short, 8, 512, 4) + batch_bytes(
        short, 8, 100, 300, use_cache=False
    )


def test_cogs_prediction_streams_a_text(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cog itself is not installed here."""
    fake = types.SimpleNamespace(BasePredictor=object, ConcatenateIterator=list, Input=lambda **_: None, Path=Path)
    monkeypatch.setitem(sys.modules, "cog", fake)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("predict", ROOT / "scripts/cloud/predict.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    predictor = module.Predictor()
    predictor.model, predictor.tokenizer = model, ByteTokenizer()
    text = "".join(predictor.predict("ab", 9, 1.0, 50, 1.0, 7))
    settings = SamplingSettings(9, 1.0, 50, 1.0)
    chunks = generate_text(model, ByteTokenizer(), [[*b"ab"]], settings, seeds=[7])
    assert text == "".join(chunk.text for chunk in chunks) != ""
