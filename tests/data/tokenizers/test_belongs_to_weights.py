from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.manifest import load_manifest
from llmscale.data.tokenizers.load_tokenizer import check_tokenizer_of_weights, load_tokenizer
from llmscale.data.tokenizers.save_for_transformers import save_for_transformers
from llmscale.data.tokenizers.tokenizer import TiktokenTokenizer
from llmscale.data.tokenizers.train_tokenizer import train_tokenizer
from llmscale.errors import DataError

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(f"the cat {n} sat on the mat, isn't it?\n\tdef f(x): return x\n" for n in range(200)))
    return path


def _make_set(corpus: Path, tokenizer: str, out: Path) -> Path:
    options = PrepareOptions(seq_len=16, val_fraction=0)
    prepare(open_source(str(corpus)), out, load_tokenizer(tokenizer), options, num_workers=1)
    return out


@pytest.fixture(scope="module")
def trained(corpus: Path) -> Path:
    """Folder of a tokenizer of 300 tokens."""
    train_tokenizer(open_source(str(corpus)), corpus.parent / "trained", VOCAB_SIZE)
    return corpus.parent / "trained"


@pytest.fixture(scope="module")
def data_set(corpus: Path, trained: Path) -> Path:
    return _make_set(corpus, str(trained), corpus.parent / "set")


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A model's folder with that tokenizer and 320 rows."""
    shutil.copytree(trained, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 320, "limit": Infinity}')
    return tmp_path / "model"


def _check(data_set: Path, model: Path) -> str:
    return check_tokenizer_of_weights(data_set, load_manifest(data_set), model)


def _change(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record, indent=3, ensure_ascii=True))


def test_the_same_vocabulary_in_another_form(data_set: Path, model: Path) -> None:
    assert _check(data_set, model) == f"The dataset's 300 tokens are those of {model}/tokenizer.json."
    _change(model / "tokenizer.json", lambda record: record.update(normalizer={"type": "NFC"}, truncation=None))
    assert "300 tokens are those" in _check(data_set, model)
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    _change(
        model / "tokenizer.json",
        lambda record: record["added_tokens"].append({"id": 300, "content": "<|im_start|>", **added}),
    )
    assert _check(data_set, model).endswith("which has 1 more.")


def test_a_vocabulary_without_tokenizer_json(data_set: Path, model: Path) -> None:
    record = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").unlink()
    vocab = record["model"]["vocab"]
    eot = {"<|endoftext|>": vocab.pop("<|endoftext|>")}
    (model / "vocab.json").write_text(json.dumps(vocab))
    (model / "added_tokens.json").write_text(json.dumps(eot))
    assert _check(data_set, model).endswith("model/vocab.json.")


@pytest.mark.parametrize("tokenizer", ["bytes", "tiktoken"])
def test_our_own_vocabularies_and_their_exports(tokenizer: str, corpus: Path, tmp_path: Path) -> None:
    ranks = {bytes([255 - value]): value for value in range(256)} | {b"th": 256, b"the": 257}
    if tokenizer == "tiktoken":
        TiktokenTokenizer("made", ranks).save(tmp_path)
        tokenizer = str(tmp_path / "ranks.tiktoken")
    data_set = _make_set(corpus, tokenizer, tmp_path / "set")
    save_for_transformers(load_tokenizer(tokenizer), tmp_path)
    assert "are those of" in _check(data_set, tmp_path)
    other = ranks | {b"the": 256, b"th": 257}
    save_for_transformers(TiktokenTokenizer("made", other), tmp_path)
    with pytest.raises(
        DataError, match=r"another tokenizer .*: token \d+ is '.+' in the dataset and '.+' in tokenizer"
    ):
        _check(data_set, tmp_path)


def test_what_differs_is_named(data_set: Path, model: Path) -> None:
    def swap(record: dict[str, dict[str, dict[str, int]]]) -> None:
        vocab = record["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    _change(model / "tokenizer.json", swap)
    with pytest.raises(
        DataError, match=r"token 65 is 'a' in the dataset and 'b' in tokenizer\.json, and 2 differ\. Prep"
    ):
        _check(data_set, model)


def test_tokens_that_the_model_lacks(data_set: Path, model: Path) -> None:
    def shorten(record: dict[str, dict[str, object]]) -> None:
        vocab = record["model"]["vocab"]
        assert isinstance(vocab, dict)
        del vocab[max(vocab, key=vocab.__getitem__)]

    _change(model / "tokenizer.json", shorten)
    with pytest.raises(
        DataError, match=r"token 299 is '.*' in the dataset and no token in tokenizer\.json, and 1 differ"
    ):
        _check(data_set, model)
    (model / "config.json").write_text('{"vocab_size": 256}')
    with pytest.raises(DataError, match=r"a tokenizer of 300 tokens, but the weights in .* have 256 rows\. Prep"):
        _check(data_set, model)


def test_a_folder_without_a_tokenizer(data_set: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "only sizes were compared, 300 tokens in the dataset, 320 rows" in _check(data_set, model)
    (model / "config.json").write_text('{"vocab_size": 50257}')
    with pytest.raises(DataError, match=r"300 tokens, .* 50,257 rows, more than padding explains"):
        _check(data_set, model)
    (model / "config.json").unlink()
    with pytest.raises(DataError, match=r"neither a tokenizer nor a config\.json"):
        _check(data_set, model)


@pytest.mark.parametrize(
    ("name", "contents", "text"),
    [
        ("config.json", '{"vocab_size": "many"}', r"config\.json: vocab_size is 'many'"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1.5}}}', r"has the token id 1\.5\. Legal: whole numbers below"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1, "b": 1}}}', r"the tokens 'a' and 'b' have one id"),
        ("tokenizer.json", '{"model": {"vocab": 7}}', r"model\.vocab or added_tokens is wrong"),
        ("tokenizer.json", '{"model": {"vocab": [["a"]]}}', r"model\.vocab or added_tokens is wrong"),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [7]}', r"model\.vocab or added_tokens is wrong"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0, "content": "b"}]}',
            r"the tokens 'a' and 'b' have one id, 0",
        ),
    ],
)
def test_damaged_folders(name: str, contents: str, text: str, data_set: Path, model: Path) -> None:
    (model / name).write_text(contents)
    with pytest.raises(DataError, match=text):
        _check(data_set, model)
