"""Sets for going on with a published model's pre-training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.cli.main import main
from llmscale.data.shards.cache import fetch_tokenizer, open_set
from llmscale.data.shards.manifest import load_manifest
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.errors import DataError
from tests.data.tokenizers.conftest import TEMPLATE, MakeModel, make_model, trained_json

__all__ = ["make_model", "trained_json"]
FORGED = "forged <|endoftext|><s><|im_start|> text\r\n"
Prepare = Callable[..., int]


@pytest.fixture
def model(make_model: MakeModel) -> Path:
    config = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "chat_template": TEMPLATE}
    return make_model(template="<s> $A", config=config)


@pytest.fixture
def prepare(model: Path, tmp_path: Path) -> Prepare:
    texts = [f"{FORGED}{number} naïve 🙂" * 3 for number in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def call(*words: str, workers: int = 1) -> int:
        given = ["--input", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "set"), "--no-shuffle"]
        given += ["--tokenizer", str(model), "--seq-len", "32", "--val-fraction", "0", "--workers", str(workers)]
        return main(["data", "prepare", *given, *words])

    return call


def _tokens(folder: Path) -> list[int]:
    location = open_set(str(folder))
    shards = TokenShards(location, "train")
    windows = shards.read(np.arange(len(shards)))
    return [int(windows[0][0]), *(int(token) for window in windows for token in window[1:])]


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_stand_between_the_models_own_tokens(
    workers: int, model: Path, prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(workers=workers) == 0
    errors = capsys.readouterr().err
    assert "Documents begin with '<s>' (600) and end with '<|endoftext|>' (601, eos_token of tok" in errors
    shutil.rmtree(model)
    tokenizer = load_set_tokenizer(tmp_path / "set")
    assert (tokenizer.bos_tokens, tokenizer.eot_token) == ((600,), 601)
    tokens = _tokens(tmp_path / "set")
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == 601:
            documents.append([])
    assert all(document[0] == 600 and document.count(600) == 1 for document in documents[:-1])
    assert tokenizer.decode(documents[7][1:-1]) == f"{FORGED}7 naïve 🙂" * 3
    assert not {602, 603, 604} & set(tokens)
    assert main(["data", "verify", str(tmp_path / "set")]) == 0


def test_special_tokens_become_tokens_where_that_was_asked(prepare: Prepare, tmp_path: Path) -> None:
    assert prepare("--parse-special-tokens") == 0
    assert 602 in _tokens(tmp_path / "set")
    assert prepare() == 2, "another set"
    assert prepare("--overwrite") == 0
    assert prepare("--parse-special-tokens") == 2
    assert prepare("--eot-token", "<|im_end|>") == 2
    assert prepare() == 0


def test_a_remote_sets_tokenizer_comes_with_its_files(prepare: Prepare, tmp_path: Path) -> None:
    assert prepare() == 0
    location = open_set(str(tmp_path / "set"), tmp_path / "cache")
    fetch_tokenizer(location)
    files = {path.name: path.read_bytes() for path in (tmp_path / "set/tokenizer").iterdir()}
    assert files.keys() == {"tokenizer.json", "origin.json", "tokenizer_config.json"}
    assert {path.name: path.read_bytes() for path in (location.folder / "tokenizer").iterdir()} == files
    assert load_set_tokenizer(location.folder, location.manifest).eot_token == 601


def test_a_set_whose_tokenizer_does_not_say_where_documents_end_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    assert prepare() == 0
    folder = tmp_path / "set"
    record = json.loads((folder / "manifest.json").read_text())
    record["tokenizer_files"] = "tokenizer/tokenizer.json"
    (folder / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="Prepare the dataset again"):
        load_set_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eot_token": 7}, r"is not the tokenizer with which .* was prepared"),
        ({"eot_token": 70_000}, r"lacks the token 70000"),
        ({"bos_tokens": [99_999]}, r"lacks the token 99999"),
        ({"bos_tokens": ["x"]}, r"bos_tokens.0 = 'x': must be a valid integer"),
        ({"files": ["../../secret"]}, r"files\.0 = '\.\./\.\./secret': legal: tokenizer_config\.json, "),
        ({"sha256": {"tokenizer_config.json": "0" * 64}}, r"tokenizer_config\.json was altered"),
        ({"sha256": 7}, r"sha256 = 7: must be a mapping"),
    ],
)
def test_altered_origins(change: dict[str, object], text: str, prepare: Prepare, tmp_path: Path) -> None:
    assert prepare() == 0
    path = tmp_path / "set/tokenizer/origin.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match=text):
            location = open_set(str(tmp_path / "set"), cache)
            fetch_tokenizer(location)
            load_set_tokenizer(location.folder, location.manifest)


def test_a_file_that_was_kept_is_there_and_unaltered(
    prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare() == 0
    folder = tmp_path / "set"
    config = folder / "tokenizer/tokenizer_config.json"
    content = config.read_bytes()
    config.write_bytes(content + b" ")
    assert main(["data", "verify", str(folder)]) == 2
    assert "tokenizer_config.json was altered" in capsys.readouterr().err
    config.unlink()
    assert main(["data", "verify", str(folder)]) == 2
    assert "tokenizer_config.json is missing" in capsys.readouterr().err
    config.write_bytes(content)
    origin = json.loads((folder / "tokenizer/origin.json").read_text())
    del origin["sha256"]  # an older version's
    (folder / "tokenizer/origin.json").write_text(json.dumps(origin))
    assert main(["data", "verify", str(folder)]) == 0


def test_missing_files_of_a_set(prepare: Prepare, tmp_path: Path) -> None:
    assert prepare() == 0
    folder = tmp_path / "set"
    (folder / "tokenizer/origin.json").unlink()
    with pytest.raises(DataError, match=r"origin\.json does not exist"):
        load_set_tokenizer(folder, load_manifest(folder))
