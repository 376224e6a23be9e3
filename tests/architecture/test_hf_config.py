"""A config.json of transformers: where it is found, and whether llmscale trains its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.architecture.hf_config import check_is_trained, find_config
from llmscale.errors import ConfigError

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"vocab_size": 131, "intermediate_size": 96}


def check(place: Path | str) -> None:
    check_is_trained(find_config(str(place), "test").entries, "test")


def test_a_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    of_file, in_folder = (find_config(str(place), "test") for place in (tmp_path / "config.json", tmp_path))
    assert of_file == in_folder
    check(tmp_path)


def test_a_kind_of_rotations_that_a_flag_replaces_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    check(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "model_type is missing"),
        ('{"model_type": "llamma"}', "no model of type 'llamma'. Supported: gpt2"),
        ('{"model_type": "gpt_neox"}', "no model of type 'gpt_neox'. The nearest is gpt2"),
        ('{"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1, "vocab_size": "9"}', "vocab_size is '9'"),
    ],
)
def test_why_a_model_is_not_trained_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        check(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/folder/config.json", "./missing", "a/b/c"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check(name)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        check(tmp_path)
