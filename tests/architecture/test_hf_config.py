"""Parameter counts of transformers' families, tensor by tensor against models that transformers itself builds."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from llmscale.architecture.hf_config import HFModel, load_hf_model
from llmscale.errors import ConfigError
from scripts.bench.transformers_package import import_transformers

SIZES: dict[str, object] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
OPT = {**SIZES, "model_type": "opt", "ffn_dim": 100}
NEOX = {**SIZES, "model_type": "gpt_neox", "intermediate_size": 128}
FALCON = {**SIZES, "model_type": "falcon"}
SHARED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, object]] = {
    "opt-350m-like": {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "opt-no-bias": {**OPT, "word_embed_proj_dim": 32, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "gpt_neox": NEOX,
    "gpt_neox-tied": {**NEOX, "tie_word_embeddings": True, "attention_bias": False},
    "falcon-7b": {**FALCON, "multi_query": True, "parallel_attn": True, "alibi": False, "bias": False},
    "falcon-rw": {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    "falcon-40b": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 131},
    "mpt": {"model_type": "mpt", "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 131},
    "gptj": {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 131},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 131,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 64,
    },
    "phi": {**SHARED, "model_type": "phi"},
    "phi3": {**SHARED, "model_type": "phi3", "pad_token_id": 0},
    "starcoder2": {**SHARED, "model_type": "starcoder2"},
}


def load(folder: Path, config: dict[str, object]) -> HFModel:
    (folder / "config.json").write_text(json.dumps(config))
    model = load_hf_model(str(folder))
    assert model is not None
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    transformers = import_transformers()
    model = load(tmp_path, CONFIGS[name])
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"), transformers.modeling_utils.no_init_weights():
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.tie_weights()
    assert model.num_parameters == theirs.num_parameters()
    ours = [parameter.shape for _, layer in model.architecture.all_layers() for parameter in layer.parameters]
    # transformers' shapes, each as often as it occurs; a transposed matrix is as large.
    assert Counter(map(math.prod, ours)) == Counter(p.numel() for p in theirs.parameters())
    assert Counter(map(len, ours)) == Counter(p.dim() for p in theirs.parameters())


def test_gpt_neox_20b_has_its_published_size(tmp_path: Path) -> None:
    sizes = {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576}
    assert load(tmp_path, {**NEOX, **sizes, "vocab_size": 50432}).num_parameters == 20_554_567_680


def test_a_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    in_folder = load(tmp_path, CONFIGS["gpt_neox"])
    of_file = load_hf_model(str(tmp_path / "config.json"))
    assert of_file is not None
    assert of_file.architecture == in_folder.architecture


def test_of_a_model_that_llmscale_trains_more_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 211})
    )
    assert load_hf_model(str(tmp_path)) is None


def test_a_kind_of_rotations_that_a_flag_replaces_is_no_obstacle(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"vocab_size": 131, "intermediate_size": 96, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_hf_model(str(tmp_path)) is None


@pytest.mark.parametrize("names", [("hidden_size", "n_head"), ("n_embed", "num_attention_heads")])
def test_blooms_entries_have_two_names(names: tuple[str, str], tmp_path: Path) -> None:
    width, heads = names
    config = {"model_type": "bloom", width: 1024, heads: 16, "n_layer": 24, "vocab_size": 250_880}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_hf_model(str(tmp_path))
    assert model is not None
    # bigscience/bloom-560m
    assert model.num_parameters == 559_214_592


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "model_type is missing"),
        ('{"model_type": "llamma"}', "no model of type 'llamma'. Supported: gpt2"),
        ('{"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1, "vocab_size": "9"}', "vocab_size is '9'"),
    ],
)
def test_a_bad_config_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_hf_model(str(tmp_path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/folder/config.json", "./missing", "a/b/c"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_hf_model(name)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        load_hf_model(str(tmp_path))


def test_it_says_what_it_cannot_know(tmp_path: Path) -> None:
    text = load(tmp_path, CONFIGS["gpt_neox"]).unknown
    assert "attention" in text
    assert "gpt_neox" in text
