from __future__ import annotations

import pytest

from llmscale.config.presets import PRESETS, get_preset, nearest_preset
from llmscale.config.run_config import build_run_config
from llmscale.errors import ConfigError

#: Layers, width, heads, peak learning rate, batch in tokens: Brown et al. 2020, table 2.1; Zhang et al. 2022, table 1.
PAPERS = {
    "gpt3-125m": (12, 768, 12, 6.0e-4, 0.5e6),
    "gpt3-350m": (24, 1024, 16, 3.0e-4, 0.5e6),
    "gpt3-760m": (24, 1536, 16, 2.5e-4, 0.5e6),
    "gpt3-2.7b": (32, 2560, 32, 1.6e-4, 1e6),
    "gpt3-6.7b": (32, 4096, 32, 1.2e-4, 2e6),
    "gpt3-175b": (96, 12288, 96, 0.6e-4, 3.2e6),
    "opt-125m": (12, 768, 12, 6.0e-4, 0.5e6),
    "opt-350m": (24, 1024, 16, 3.0e-4, 0.5e6),
    "opt-1.3b": (24, 2048, 32, 2.0e-4, 1e6),
    "opt-2.7b": (32, 2560, 32, 1.6e-4, 1e6),
    "opt-6.7b": (32, 4096, 32, 1.2e-4, 2e6),
    "opt-13b": (40, 5120, 40, 1.0e-4, 4e6),
    "opt-30b": (48, 7168, 56, 1.0e-4, 4e6),
    "opt-66b": (64, 9216, 72, 0.8e-4, 2e6),
    "opt-175b": (96, 12288, 96, 1.2e-4, 2e6),
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_and_its_batch_holds_whole_sequences(name: str) -> None:
    preset = get_preset(name)
    shape = preset.shape(257)
    assert shape.head_dim >= 32
    assert preset.global_batch_tokens % preset.seq_len == 0


@pytest.mark.parametrize("name", PAPERS)
def test_presets_are_the_papers(name: str) -> None:
    layers, width, heads, lr, batch_tokens = PAPERS[name]
    preset = get_preset(name)
    assert (preset.n_layer, preset.n_embd, preset.n_head, preset.learning_rate) == (layers, width, heads, lr)
    assert preset.seq_len == 2048
    assert preset.global_batch_tokens == pytest.approx(batch_tokens, rel=0.06)
    if name.startswith("opt"):
        shape = preset.shape(preset.vocab_size)
        assert (shape.activation, shape.positions, shape.seq_len, shape.tied) == ("relu", "learned", 2048, True)


def test_a_preset_s_keys_hold_until_others_are_given() -> None:
    opt = build_run_config({"model": "opt-125m"})
    assert (opt.dropout, opt.schedule, opt.min_lr_frac, opt.optimizer) == (0.1, "linear", 0.1, "adamw")
    assert build_run_config({"model": "opt-125m", "dropout": 0.0, "schedule": "cosine"}).schedule == "cosine"
    assert build_run_config({"model": "opt-125m", "dropout": 0.0}).dropout == 0.0
    assert build_run_config({"model": "tiny-muon-1m"}).optimizer == "muon"
    plain = build_run_config({"model": "gpt3-125m"})
    assert (plain.dropout, plain.schedule, plain.optimizer) == (0.0, "cosine", "adamw")
    assert nearest_preset(get_preset("opt-125m").shape(50_272)) == "gpt3-125m"


#: Millions of parameters that the published configurations make, as their model cards count them. Those of which the
#: configuration itself is here are in tests/architecture/families/test_published.py.
PUBLISHED_MILLIONS = {
    "opt-1.3b": 1315.76,
    "opt-6.7b": 6658.5,
    "opt-13b": 12853.5,
    "llama3-3b": 3212.7,
    "llama3-70b": 70553.7,
    "qwen3-1.7b": 1720.6,
    "qwen3-4b": 4022.5,
    "qwen3-32b": 32762.1,
    "smollm2-360m": 361.821,
    "smollm2-1.7b": 1711.4,
}


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    preset = get_preset(name)
    assert preset.shape(preset.vocab_size).num_parameters == pytest.approx(PUBLISHED_MILLIONS[name] * 1e6, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-30b-a3b", 3.35), ("mixtral-8x7b", 12.88), ("olmoe-1b-7b", 1.28)]
)
def test_a_token_uses_as_many_parameters_as_the_model_card_says(name: str, billions: float) -> None:
    """3.3, 12.9 and 1.3 there."""
    preset = get_preset(name)
    assert preset.shape(preset.vocab_size).active_parameters == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize("size", ["124m", "350m", "1.5b"])
def test_a_modern_gpt_is_as_large_as_gpt_2(size: str) -> None:
    modern, gpt2 = (get_preset(f"{family}-{size}").shape(50257) for family in ("gpt-modern", "gpt2"))
    assert modern.num_parameters == pytest.approx(gpt2.num_parameters, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "mistral-7b",
        "deepseek-r1-distill-llama-8b",
    ],
)
def test_a_model_of_another_family_is_no_preset(name: str) -> None:
    with pytest.raises(ConfigError, match="named hf:ORGANISATION/NAME") as error:
        get_preset(name)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama-7b", "llama3-8b"),
        ("qwen2.5-coder-7b", "qwen3-8b"),
        ("gpt3-7b", "gpt3-6.7b"),
        ("gtp2-124m", "gpt2-124m"),
        ("tiny-moe", "tiny-moe-3m"),
    ],
)
def test_the_nearest_of_a_family_is_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        get_preset(name)
