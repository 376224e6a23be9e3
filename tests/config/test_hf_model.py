"""A published model as the keys of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.config.hf_model import (
    PUBLISHED_KEYS,
    default_preset,
    read_published_model,
    with_published_shape,
    with_saved_shape,
)
from llmscale.config.resolve import SetFacts, resolve_shape
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from tests.hub_server import lead_to_hub

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 5e5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "llama")


def write(folder: Path, **entries: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **entries}))
    return folder


def begun(folder: Path, **keys: object) -> RunConfig:
    """The configuration of a run that begins from the folder's weights."""
    message = f"hf:{folder}"
    return with_published_shape(RunConfig(init_from=message, **keys), read_published_model("--init-from", message))


def test_weights_set_every_key_of_the_model_and_its_vocabulary(folder: Path) -> None:
    config = begun(folder, dropout=0.1)
    assert config.model == f"hf:{folder}"
    assert (config.n_layer, config.n_kv_head, config.vocab_size, config.rope_theta) == (3, 2, 300, 5e5)
    assert all(getattr(config, key) is not None for key in PUBLISHED_KEYS)
    shape = resolve_shape(config, SetFacts(vocab_size=257, seq_len=512, num_train_samples=1, eot_token=256))
    assert (shape.vocab_size, shape.seq_len, shape.gated_mlp, shape.dropout) == (300, 512, True, 0.1)


def test_a_given_key_may_repeat_what_the_weights_say_and_not_contradict_it(folder: Path) -> None:
    assert begun(folder, n_layer=3, rope_theta=5e5).n_layer == 3
    with pytest.raises(ConfigError, match=rf"n_layer is 4 by --n-layer and 3 by --init-from hf:{folder}"):
        begun(folder, n_layer=4)
    with pytest.raises(ConfigError, match=r"is .* by --model tiny-1m and .* by --init-from hf:.*Drop --model"):
        begun(folder, model="tiny-1m")
    other = write(folder.parent / "other", num_hidden_layers=5)
    with pytest.raises(ConfigError, match=rf"n_layer is 5 by --model hf:{other} and 3 by --init-from hf:{folder}"):
        begun(folder, model=f"hf:{other}")


def test_a_shape_without_its_weights_can_be_changed_as_a_presets_can(folder: Path) -> None:
    config = with_published_shape(RunConfig(model=f"hf:{folder}", n_embd=128), None)
    assert (config.n_layer, config.n_embd, config.head_dim, config.mlp_width) == (3, 128, 16, 192)
    assert with_published_shape(RunConfig(model="tiny-1m"), None) == RunConfig(model="tiny-1m")


def test_a_run_that_goes_on_needs_the_folder_no_more(folder: Path) -> None:
    saved = begun(folder).model_dump(mode="json")
    (folder / "config.json").unlink()
    for config in (RunConfig(steps=7), RunConfig(steps=7, model=f"hf:{folder}")):
        continued = with_saved_shape(config, saved, "checkpoint")
        assert continued is not None
        assert continued.steps == 7
        assert {key: getattr(continued, key) for key in PUBLISHED_KEYS} == {key: saved[key] for key in PUBLISHED_KEYS}
    assert with_saved_shape(RunConfig(model="tiny-1m"), saved, "checkpoint") is None
    with pytest.raises(ConfigError, match="n_layer is 9 by --n-layer and 3 by checkpoint"):
        with_saved_shape(RunConfig(n_layer=9), saved, "checkpoint")


def test_a_run_that_begins_with_another_takes_its_preset_and_shape_unless_it_names_a_model() -> None:
    saved = RunConfig(model="tiny-1m", n_layer=2, norm="rmsnorm").model_dump(mode="json")
    begun = with_saved_shape(RunConfig(lora_rank=4, norm="layernorm"), saved, "checkpoint")
    assert begun is not None
    assert (begun.model, begun.n_layer, begun.norm, begun.lora_rank) == ("tiny-1m", 2, "layernorm", 4)
    for model in ("tiny-1m", "tiny-10m"):
        assert with_saved_shape(RunConfig(model=model), saved, "checkpoint") is None


def test_what_a_hostile_checkpoint_says_of_the_shape_is_checked(folder: Path) -> None:
    saved = begun(folder).model_dump(mode="json")
    for key, value in (("n_layer", 10**9), ("norm", "batch"), ("tied", 3)):
        with pytest.raises(ConfigError, match=f"{key} = "):
            with_saved_shape(RunConfig(), {**saved, key: value}, "checkpoint")


def test_rates_and_batches_are_those_of_the_preset_nearest_in_size(folder: Path) -> None:
    assert default_preset(RunConfig(model="gpt2-124m")) == "gpt2-124m"
    assert default_preset(begun(folder)) == "tiny-1m"
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}
    large = write(folder.parent / "large", **sizes, num_attention_heads=32, tie_word_embeddings=True)
    assert default_preset(begun(large)) == "llama3-1b"


def test_a_name_is_looked_up_in_the_hubs_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to_hub(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--own--model" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    actual = read_published_model("--init-from", f"hf:own/model@{commit}")
    assert (actual.folder, actual.hub_name) == (snapshot, f"own/model@{commit}")


def test_a_folder_may_lie_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read_published_model("--model", "hf:~/llama").folder == folder


def test_experts_may_be_added_to_dense_weights_as_copies_of_the_mlp(folder: Path) -> None:
    config = begun(folder, num_experts=4, experts_per_token=1, expert_interval=2, normalize_router=False)
    facts = SetFacts(vocab_size=257, seq_len=512, num_train_samples=1, eot_token=256)
    shape = resolve_shape(config, facts)
    assert (shape.num_experts, shape.experts_per_token, shape.expert_width, shape.normalize_router) == (4, 1, 96, False)
    assert [shape.is_sparse(block) for block in range(3)] == [False, True, False]
    with pytest.raises(ConfigError, match=r"expert_width is 48, and experts of .* begin as copies of its MLP, 96 wide"):
        begun(folder, num_experts=4, expert_width=48)
    with pytest.raises(ConfigError, match=r"shared_expert_width is 96, and .* Drop --shared-expert-width"):
        begun(folder, num_experts=4, shared_expert_width=96)
    with pytest.raises(
        ConfigError, match=r"the MLP has biases and experts have none, so it cannot become num_experts 4"
    ):
        begun(write(folder.parent / "biased", mlp_bias=True), num_experts=4)
    mixtral = write(folder.parent / "mixtral", model_type="mixtral", num_local_experts=8)
    with pytest.raises(ConfigError, match=r"num_experts is 4 by --num-experts and 8 by --init-from"):
        begun(mixtral, num_experts=4)
