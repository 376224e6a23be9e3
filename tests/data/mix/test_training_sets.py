from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.mixture import (
    RECORDED_SETS,
    MixedShards,
    keep_sets,
    open_kept_sets,
    open_recorded_sets,
    open_training_sets,
)
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer, load_tokenizer
from llmscale.data.tokenizers.train_tokenizer import train_tokenizer
from llmscale.errors import ConfigError, DataError


@pytest.fixture
def mix(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "mix.yaml"
    folders = {"small": make_set(8), "large": make_set(24)}
    listed = "".join(f"  {name}: {folder}\n" for name, folder in folders.items())
    path.write_text(f"sets:\n{listed}weights: {{small: 3, large: 1}}\n")
    return path


def test_samples_count_through_all_sets(mix: Path) -> None:
    sets = open_training_sets(str(mix))
    shards = [TokenShards(location, "train") for location in sets.locations]
    both = MixedShards(sets.locations, "train")
    assert len(both) == sets.num_train_samples == len(shards[0]) + len(shards[1])
    ids = np.array([len(both) - 1, 0, len(shards[0]), len(shards[0]) - 1])
    expected = [shards[1].read(np.array([len(shards[1]) - 1]))[0], shards[0].read(np.array([0]))[0],
                shards[1].read(np.array([0]))[0], shards[0].read(np.array([len(shards[0]) - 1]))[0]]  # fmt: skip
    assert np.array_equal(both.read(ids), np.stack(expected))
    assert both.read(np.empty(0, np.int64)).shape == (0, sets.manifest.seq_len + 1)


def test_weights_are_no_part_of_what_samples_mean(mix: Path) -> None:
    before = open_training_sets(str(mix)).fingerprint
    mix.write_text(mix.read_text().replace("small: 3", "small: 1"))
    assert open_training_sets(str(mix)).fingerprint == before
    lines = mix.read_text().splitlines()
    mix.write_text("\n".join([lines[0], lines[2], lines[1], lines[3]]))
    assert open_training_sets(str(mix)).fingerprint != before, "sample ids count in the order of the sets"


def test_what_a_checkpoint_recorded_stands_in_for_a_file_that_is_gone(mix: Path) -> None:
    sets = open_training_sets(str(mix))
    assert sets.recipe is not None
    assert list(map(float, sets.recipe.parts)) == [0.75, 0.25]
    places = dict(zip(sets.names, sets.recipe.data, strict=True))
    identity = {RECORDED_SETS: {name: {"data": data, "samples": 7} for name, data in places.items()}}
    recorded = open_training_sets(str(mix), None, identity).recipe
    assert recorded is not None
    assert list(map(float, recorded.parts)) == [0.5, 0.5], "the run's own proportions"
    mix.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        open_training_sets(str(mix))
    assert open_training_sets(str(mix), None, identity).fingerprint == sets.fingerprint
    for damage in ({"data": "\0", "samples": 7}, {"data": places["small"], "samples": -1}, 5):
        with pytest.raises(ConfigError, match=r"sets\.small|must be numbers"):
            open_training_sets(str(mix), None, {RECORDED_SETS: {**identity[RECORDED_SETS], "small": damage}})


def test_a_single_set_is_as_without_a_mix(make_set: Callable[..., Path]) -> None:
    sets = open_training_sets(str(make_set(8)))
    assert sets.fingerprint == sets.manifest.fingerprint
    assert sets.recipe is None


def test_a_set_that_is_not_there_is_named(mix: Path, tmp_path: Path) -> None:
    text = mix.read_text()
    mix.write_text(text.replace(text.split("small: ")[1].split("\n")[0], str(tmp_path / "gone"), 1))
    with pytest.raises((DataError, ConfigError), match="gone"):
        open_training_sets(str(mix))


@pytest.mark.parametrize(
    "address", ["s3://theirs/set", "hf://datasets/their/set", "http://127.0.0.1:1/set", "file://s3://a"]
)
def test_no_address_is_asked_that_only_a_checkpoint_names(
    mix: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(url: str, **_: object) -> object:
        asked.append(url)
        raise DataError(f"no answer from {url}")

    monkeypatch.setattr("llmscale.data.shards.cache.Store", refuse)
    mix.write_text(f"sets:\n  theirs: {address}\n  b: b\nweights: {{theirs: 1, b: 1}}\n")
    for data in (address, str(mix)):
        for given in (None, "elsewhere", "s3://mine/set"):
            with pytest.raises(DataError, match=f"(?s){address}.*--data {data}"):
                open_recorded_sets(data, None, given, {})
    assert asked == []
    if not address.startswith("file:"):
        with pytest.raises(DataError, match="no answer"):
            open_recorded_sets(address, mix.parent, address, {})
        assert asked


def test_a_folder_that_a_checkpoint_names_is_read(make_set: Callable[..., Path]) -> None:
    folder = make_set(8)
    assert open_recorded_sets(str(folder), None, None, {}).fingerprint == open_training_sets(str(folder)).fingerprint


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "trained", "model"])
def test_a_run_keeps_the_tokenizer_of_a_set_that_is_gone(kind: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    name = "bytes"
    if kind == "tiktoken":
        ranks = [bytes([value]) for value in range(256)] + [b"th", b"the"]
        name = str(tmp_path / "mine.tiktoken")
        Path(name).write_text(
            "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
        )
    elif kind != "bytes":
        name = str(tmp_path / "tokenizer")
        train_tokenizer(open_source(str(text)), Path(name), 280)
    if kind == "model":
        (Path(name) / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(name)
    prepare(open_source(str(text)), tmp_path / "set", tokenizer, PrepareOptions(seq_len=16), num_workers=1)
    sets = open_training_sets(str(tmp_path / "set"))
    keep_sets(sets, tmp_path / "run")
    keep_sets(sets, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    for folder in (tmp_path / "set", tmp_path / "tokenizer"):
        shutil.rmtree(folder, ignore_errors=True)
    moved = open_kept_sets(tmp_path / "moved", sets.fingerprint, "set")
    assert moved is not None
    again = load_set_tokenizer(moved.first.folder, moved.manifest)
    assert again.encode("the quick fox") == tokenizer.encode("the quick fox")
    assert sorted(path.name for path in (tmp_path / "moved").rglob("chat_template.jinja")) == (
        ["chat_template.jinja"] if kind == "model" else []
    )
    assert open_kept_sets(tmp_path / "moved", "0" * 64, "set") is None
    assert open_kept_sets(tmp_path / "moved", "../../set", "set") is None
    (moved.first.folder / "manifest.json").write_text("{}")
    assert open_kept_sets(tmp_path / "moved", sets.fingerprint, "set") is None


def test_a_run_keeps_what_all_sets_of_a_mix_are(mix: Path, tmp_path: Path) -> None:
    sets = open_training_sets(str(mix))
    keep_sets(sets, tmp_path / "run")
    reopened = open_kept_sets(tmp_path / "run", sets.fingerprint, "mix")
    assert reopened is not None
    assert (reopened.names, reopened.num_train_samples) == (sets.names, sets.num_train_samples)
