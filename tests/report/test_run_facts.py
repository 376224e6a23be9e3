from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmscale.data.shards.manifest import load_manifest
from llmscale.report.history import RunHistory, load_history
from llmscale.report.run_facts import load_facts
from tests.report.runs import HOSTILE, SHAPE, full_run, hostile_run, start, train, write_run


def test_reads_the_model_and_the_data(tmp_path: Path, tiny_set: Path) -> None:
    run = full_run(tmp_path, data=str(tiny_set))
    facts, manifest = load_facts(run, load_history(run)), load_manifest(tiny_set)
    assert facts.shape is not None and facts.shape.n_embd == SHAPE["n_embd"]
    assert facts.bytes_per_token == manifest.bytes_per_target("train")
    assert facts.tokenizer == manifest.tokenizer
    assert facts.tables["Configuration"]["model"] == "tiny-1m"
    assert facts.tables["Data"]["fingerprint"] == manifest.fingerprint


def test_a_start_says_it_where_the_set_is_gone(tmp_path: Path) -> None:
    run = full_run(tmp_path, data="/nowhere/set")
    facts = load_facts(run, load_history(run))
    assert (facts.bytes_per_token, facts.tokenizer, facts.why_no_bytes) == (4.0, "gpt2", "")


def test_validation_in_both_units_says_the_ratio(tmp_path: Path) -> None:
    validation = {"kind": "validation", "step": 1, "loss": 2.0, "bits_per_byte": 1.0}
    run = write_run(tmp_path, [train(1), validation])
    assert load_facts(run, load_history(run)).validation_bytes_per_token == pytest.approx(2 / math.log(2))


@pytest.mark.parametrize(("data", "word"), [("/nowhere/set", "cannot be read"), ("mix.yaml", "mix"), (None, "not say")])
def test_why_the_ratio_is_not_known(data: str | None, word: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, [train(1)], data=data)
    facts = load_facts(run, load_history(run))
    assert facts.bytes_per_token is None
    assert word in facts.why_no_bytes


@pytest.mark.parametrize(
    "change",
    [{"n_layer": 10**18}, {"n_layer": "x"}, {"n_head": None}, {"n_head": 3}, {"activation": HOSTILE}, {"seq_len": -1}],
)
def test_a_shape_that_is_none(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"resolved": {"shape": {**SHAPE, **change}}}))
    assert load_facts(tmp_path, RunHistory()).shape is None


@pytest.mark.parametrize("contents", [b"\xff", b"[1]", b'{"config": []}', b'{"resolved": 3}', b'{"a":' * 3000])
def test_whatever_lies_in_the_folder(contents: bytes, tmp_path: Path) -> None:
    for name in ("config.json", "ds_config.json", "starts.jsonl"):
        (tmp_path / name).write_bytes(contents)
    facts = load_facts(tmp_path, RunHistory())
    assert facts.shape is None and facts.tokenizer is None


def test_texts_are_short_and_have_no_control_characters(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    tables = load_facts(run, load_history(run)).tables
    texts = [text for table in tables.values() for entry in table.items() for text in entry]
    assert any("hacked" in text for text in texts)
    assert all(text.isprintable() and len(text) < 2000 for text in texts)


def test_tables_are_bounded(tmp_path: Path) -> None:
    run = write_run(tmp_path, [start(), train(1)], **{f"key{number}": number for number in range(5000)})
    assert len(load_facts(run, load_history(run)).tables["Configuration"]) <= 400
