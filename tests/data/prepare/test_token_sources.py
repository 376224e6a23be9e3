"""Tokens that another program made: the documents between its end-of-text tokens, wherever reading begins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources import open_source as opening
from llmscale.data.prepare.sources import tokens
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.prepare.sources.source import Document, Source, TokenRules
from llmscale.data.prepare.sources.tokens import streaming_module
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests.object_store import ObjectStore

RULES = TokenRules(vocab_size=257, eot_token=256, bos_tokens=())
TEXTS = [f"document {number} " * (number % 7 + 1) for number in range(40)]
DOCUMENTS = [list(text.encode()) for text in TEXTS]


def _stream(*, eot_first: bool = False) -> list[int]:
    return [token for tokens in DOCUMENTS for token in ([256, *tokens] if eot_first else [*tokens, 256])]


def _write_nanogpt(folder: Path) -> Path:
    np.array(_stream(), np.uint16).tofile(folder / "train.bin")
    return folder / "train.bin"


def _write_llm_c(folder: Path, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    tokens = np.array(_stream(eot_first=True), dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    (folder / "shard.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return folder / "shard.bin"


def _write_llama3(folder: Path) -> Path:
    return _write_llm_c(folder, 20240801, 7, "<u4")


def _write_mds(folder: Path, encoding: str, dtype: type, *, compression: str | None = None) -> Path:
    """As llm-foundry concatenates documents: samples of one length, whose borders mean nothing."""
    stream = _stream()
    writer = streaming_module("format.mds").MDSWriter(
        columns={"tokens": encoding, "note": "str"}, out=str(folder / "mds"), size_limit=2000, compression=compression
    )
    for start in range(0, len(stream), 32):
        array = np.array(stream[start : start + 32], dtype)
        if len(array) == 32 or ":32" not in encoding:
            writer.write({"tokens": array.tobytes() if encoding == "bytes" else array, "note": "x" * (start % 5)})
    writer.finish()
    return folder / "mds"


KINDS = {
    "nanogpt": _write_nanogpt,
    "llm.c": _write_llm_c,
    "llm.c llama 3": _write_llama3,
    "mds bytes": lambda folder: _write_mds(folder, "bytes", np.int64),
    "mds ndarray:int32": lambda folder: _write_mds(folder, "ndarray:int32", np.int32),
    "mds ndarray": lambda folder: _write_mds(folder, "ndarray", np.uint16),
    "mds zstd": lambda folder: _write_mds(folder, "bytes", np.int64, compression="zstd"),
    "mds br": lambda folder: _write_mds(folder, "bytes", np.int64, compression="br"),
    "mds gz": lambda folder: _write_mds(folder, "bytes", np.int64, compression="gz"),
    "mds json": lambda folder: _write_mds(folder, "json", np.int64),
}


def _read(source: Source, start: tuple[int, ...] = ()) -> list[Document]:
    records = list(source.records(start, RULES))
    assert all(isinstance(record, Document) for record in records)
    return records  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_come_back_from_any_place_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PIECE_TOKENS", 600)
    source = open_source(str(KINDS[kind](tmp_path)))
    windows = _read(source)
    assert [np.asarray(document.content).tolist() for document in windows] == DOCUMENTS
    for number in (0, 1, 17, 39):
        rest = _read(source, windows[number].place)
        assert [np.asarray(document.content).tolist() for document in rest] == DOCUMENTS[number + 1 :]


def _put(folder: Path, store: ObjectStore) -> str:
    for path in folder.iterdir():
        store.put(f"mds/{path.name}", path.read_bytes())
    return "s3://bucket/mds"


@pytest.mark.parametrize("kind", ["mds bytes", "mds zstd"])
def test_shards_in_a_store_come_one_at_a_time(
    kind: str, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_PART_BYTES", 700)
    url = _put(KINDS[kind](tmp_path), object_store)
    for spec in (url, f"{url}/"):
        source = open_source(spec)
        object_store.requests.clear()
        windows = _read(source)
        assert [np.asarray(document.content).tolist() for document in windows] == DOCUMENTS
    fetched = [path.rpartition("/")[2] for method, path in object_store.requests if method == "GET" and ".mds" in path]
    assert fetched == sorted(fetched) and len(set(fetched)) > 3
    assert fetched.count(fetched[0]) > 1 or kind == "mds zstd"
    object_store.requests.clear()
    rest = _read(source, windows[39].place)
    assert not rest and {path for _, path in object_store.requests if "shard" in path} <= {
        f"/bucket/mds/{fetched[-1]}", f"/bucket/mds/{fetched[-1]}".replace(".zstd", "")
    }  # fmt: skip
    before = source.fingerprint()
    object_store.put(f"mds/{fetched[0]}", b"other")
    assert open_source(url).fingerprint() != before
    with pytest.raises(DataError, match="has changed"):
        _read(source)


def test_the_set_is_that_of_the_text_but_for_which_documents_validate(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    options = PrepareOptions(seq_len=8, val_fraction=0)
    made = []
    for name, path in (("text", tmp_path / "in.jsonl"), ("tokens", _write_nanogpt(tmp_path))):
        prepared = prepare(open_source(str(path)), tmp_path / name, load_tokenizer("bytes"), options, num_workers=2)
        made.append(prepared.manifest.splits["train"])
    assert made[0] == made[1]


def test_begin_of_text_is_not_there_twice(tmp_path: Path) -> None:
    np.array([7, 1, 2, 256, 7, 3, 256, 256, 7, 256], np.uint16).tofile(tmp_path / "a.bin")
    records = open_source(str(tmp_path / "a.bin")).records((), TokenRules(257, 256, (7,)))
    assert [np.asarray(record.content).tolist() for record in records] == [[1, 2], [3]]  # type: ignore[union-attr]


def test_tokens_of_another_tokenizer_and_damage_are_one_line(tmp_path: Path) -> None:
    np.array([1, 300, 256], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a\.bin holds the token 300, and the tokenizer has 257"):
        _read(open_source(str(tmp_path / "a.bin")))
    (tmp_path / "a.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match="ends within a token"):
        _read(open_source(str(tmp_path / "a.bin")))
    path = _write_llm_c(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"truncated: .* but its header states"):
        _read(open_source(str(path)))
    _write_llm_c(tmp_path, version=3)
    with pytest.raises(DataError, match="of the unknown version 3"):
        _read(open_source(str(path)))
    with pytest.raises(DataError, match="holds tokens, but text is needed"):
        list(open_source(str(path)).documents())
    with pytest.raises(DataError, match="has no llm"):
        list(open_source(str(_write_nanogpt(tmp_path))).records((), TokenRules(100_000, 256, ())))


def test_text_columns_of_mds(tmp_path: Path) -> None:
    writer = streaming_module("format.mds").MDSWriter(columns={"id": "int", "text": "str"}, out=str(tmp_path / "mds"))
    for number, text in enumerate(TEXTS):
        writer.write({"id": number, "text": text})
    writer.finish()
    assert list(open_source(str(tmp_path / "mds")).documents()) == TEXTS
    with pytest.raises(DataError, match=r"no column 'body'\. Its columns: id, text"):
        open_source(str(tmp_path / "mds"), text_field="body")


def _write_texts(folder: Path, **columns: str) -> Path:
    writer = streaming_module("format.mds").MDSWriter(columns=dict.fromkeys(columns, "str"), out=str(folder))
    for _ in range(40):
        writer.write(columns)
    writer.finish()
    return folder


def test_another_column_is_another_input(tmp_path: Path) -> None:
    made, out = _write_texts(tmp_path / "mds", text="one text", other="another text"), tmp_path / "out"
    options, tokenizer = PrepareOptions(seq_len=8), load_tokenizer("bytes")
    prepare(open_source(str(made), text_field="text"), out, tokenizer, options)
    with pytest.raises(DataError, match="--overwrite"):
        prepare(open_source(str(made), text_field="other"), out, tokenizer, options)
    index = json.loads((made / "index.json").read_text())
    index["shards"][0]["samples"] -= 1
    before = open_source(str(made)).fingerprint()
    (made / "index.json").write_text(json.dumps(index))
    assert open_source(str(made)).fingerprint() != before


def test_shards_of_tokens_behind_those_of_text_are_refused(tmp_path: Path) -> None:
    tokens, texts = _write_mds(tmp_path, "bytes", np.int64), _write_texts(tmp_path / "texts", text="a text")
    index = json.loads((texts / "index.json").read_text())
    (entry,) = index["shards"]
    (tokens / "text.mds").write_bytes((texts / entry["raw_data"]["basename"]).read_bytes())
    entry["raw_data"]["basename"] = "text.mds"
    index["shards"] += json.loads((tokens / "index.json").read_text())["shards"]
    (tokens / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="shard 0 has text in the column text, shard 1 tokens in the column tokens"):
        open_source(str(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column_encodings": ["str", "pkl"]}, "the column tokens is 'pkl'"),
        ({"raw_data": {"basename": "../secret", "bytes": 9}}, "does not name a file beside it"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 1 << 40}}, "Legal: up to 1 GiB"),
        ({"samples": 10**9}, "Legal: up to 1 GiB"),
        ({"samples": 900}, "is outside of it|is not an array"),
        ({"zip_data": {"basename": "shard.00000.mds.lz4"}}, "not compressed by .zstd, .br"),
        ({"column_sizes": [None, -5]}, "a column's size is invalid"),
        ({"format": "csv"}, "does not describe an MDS shard"),
    ],
)
def test_what_an_index_may_not_say(change: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"123456789")
    with pytest.raises(DataError, match=message):
        _read(open_source(str(_write_mds_with(change, tmp_path))))


def _write_mds_with(change: dict, folder: Path) -> Path:
    """Shards, of the first of which the index says something else."""
    made = _write_mds(folder, "bytes", np.int64)
    index = json.loads((made / "index.json").read_text())
    index["shards"][0] |= change
    (made / "index.json").write_text(json.dumps(index))
    return made


def test_a_store_lacks_a_shard_or_says_too_much(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _put(_write_mds(tmp_path, "bytes", np.int64), object_store)
    object_store.client.delete_object(Bucket="bucket", Key="mds/shard.00001.mds")
    with pytest.raises(DataError, match=r"shard\.00001\.mds is missing beside it"):
        open_source(url)
    monkeypatch.setattr(tokens, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="the limit of 100"):
        open_source(url)


def test_a_prepared_set_in_a_store_is_no_input(object_store: ObjectStore, tmp_path: Path) -> None:
    url = _put(_write_mds(tmp_path, "bytes", np.int64), object_store)
    object_store.put("manifest.json", b"{}")
    with pytest.raises(DataError, match="give its original text"):
        open_source(url)


def test_input_ids_are_tokens_whatever_the_flag(tmp_path: Path) -> None:
    """transformers' name of the column: with and without --text-field the answer is the same."""
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    writer = streaming_module("format.mds").MDSWriter(columns=columns, out=str(tmp_path / "mds"))
    for document in DOCUMENTS:
        writer.write(dict.fromkeys(columns, np.array([*document, 256], np.int32)))
    writer.finish()
    for text_field in (None, "input_ids", "labels"):
        documents = _read(open_source(str(tmp_path / "mds"), text_field=text_field))
        assert [np.asarray(document.content).tolist() for document in documents] == DOCUMENTS
    with pytest.raises(DataError, match="--text-field 'body' selects a field of"):
        open_source(str(tmp_path / "mds"), text_field="body")
