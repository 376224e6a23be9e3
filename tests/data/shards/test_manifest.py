from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmscale.data.shards.manifest import MANIFEST_NAME, check_set_matches, get_split, load_manifest, parse_manifest
from llmscale.errors import DataError


def test_it_survives_its_own_json(shared_set: Path) -> None:
    manifest = load_manifest(shared_set)
    assert parse_manifest(manifest.to_json(), "here") == manifest
    assert json.loads(manifest.to_json())["fingerprint"] == manifest.fingerprint


def test_a_split_of_a_dataset_is_told_from_the_dataset(shared_set: Path) -> None:
    with pytest.raises(DataError, match=rf"is a part of the dataset in {shared_set}\."):
        load_manifest(shared_set / "train")


def test_somebody_elses_shards_and_half_written_sets(shared_set: Path, tmp_path: Path) -> None:
    for name, text in [("copy", "MDS shards but no manifest"), (".set.partial-host-1", "an interrupted")]:
        shutil.copytree(shared_set, tmp_path / name)
        (tmp_path / name / MANIFEST_NAME).unlink()
        with pytest.raises(DataError, match=text):
            load_manifest(tmp_path / name)
    with pytest.raises(DataError, match=r"does not exist \(an interrupted prepare left \.set\.partial-host-1"):
        load_manifest(tmp_path / "set")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("{", "[", "is not JSON"),
        ('"seq_len": 16', '"seq_len": 17', "was altered: its fingerprint"),
        ('"seq_len": 16', '"seq_len": "16"', "seq_len = '16': must be a valid integer"),
        ('"seq_len": 16', '"seqlen": 16', "seq_len is missing"),
        ('"format_version": 1', '"format_version": 9', "format version 9; this llmscale reads version 1"),
        ('"num_tokens"', '"tokens"', "splits.train.num_tokens is missing"),
        ('"hash": "', '"hash": "0', r"splits.train.shards.0.hash = '0"),
    ],
)
def test_damaged_manifests(shared_set: Path, old: str, new: str, text: str) -> None:
    damaged = load_manifest(shared_set).to_json().replace(old, new, 1)
    with pytest.raises(DataError, match=text):
        parse_manifest(damaged, "manifest.json")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_tokens", 10**6, r"tail_tokens \+ cropped_tokens is 15, and must be 985311"),
        ("tail_tokens", 10**6, r"cropped_tokens is 1000000, and must be 15"),
        ("unigram_entropy_nats", 6.0, "unigram_entropy_nats is 6"),
        ("unigram_entropy_nats", -1.0, "unigram_entropy_nats is -1"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(shared_set: Path, field: str, value: float, text: str) -> None:
    record = json.loads(load_manifest(shared_set).to_json())
    record["splits"]["train"][field] = value
    with pytest.raises(DataError, match=text):
        parse_manifest(json.dumps(record), "manifest.json")


def test_sets_of_other_models_are_refused(shared_set: Path) -> None:
    manifest = load_manifest(shared_set)
    check_set_matches(manifest, "data", vocab_size=257, seq_len=16, tokenizer_sha256=manifest.tokenizer_sha256)
    with pytest.raises(DataError, match=r"seq_len 16, the model has positions for 32 tokens.*prepare --seq-len 32"):
        check_set_matches(manifest, "data", vocab_size=257, seq_len=32)
    with pytest.raises(DataError, match="token ids up to 256, beyond the model's vocab_size 256"):
        check_set_matches(manifest, "data", vocab_size=256, seq_len=16)
    with pytest.raises(DataError, match="tokenizer bytes of 257 tokens, the model has vocab_size 50257"):
        check_set_matches(manifest, "data", vocab_size=50257, seq_len=16)
    with pytest.raises(DataError, match="another tokenizer"):
        check_set_matches(manifest, "data", vocab_size=257, seq_len=16, tokenizer_sha256="0" * 64)


def test_unknown_splits_name_the_known(shared_set: Path) -> None:
    with pytest.raises(DataError, match="data has no split 'test', only train, val"):
        get_split(load_manifest(shared_set), "test", "data")
