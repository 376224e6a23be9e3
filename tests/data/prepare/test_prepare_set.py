from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.cli.main import main
from llmscale.data.prepare import split_writer, tokenise
from llmscale.data.prepare.prepare_set import Prepared, PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.prepare.split_writer import Run, WindowShuffle, unigram_entropy_nats, window_keys
from llmscale.data.prepare.tokenise import hash_text, split_scores
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.manifest import Manifest, load_manifest
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer, load_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.data.tokenizers.train_tokenizer import train_tokenizer
from llmscale.errors import DataError

WriteDocuments = Callable[..., list[str]]
SMALL = PrepareOptions(seq_len=16, val_fraction=0.1, shard_bytes=4096)


def _prepare(
    path: Path,
    out: Path,
    options: PrepareOptions = SMALL,
    *,
    tokenizer: str = "bytes",
    workers: int = 1,
    overwrite: bool = False,
) -> Prepared:
    return prepare(
        open_source(str(path)), out, load_tokenizer(tokenizer), options, num_workers=workers, overwrite=overwrite
    )


def _windows_of_the_text(out: Path, split: str) -> np.ndarray:
    """The split's windows, the shuffle undone."""
    shards = TokenShards(open_set(str(out)), split)
    stored = shards.read(np.arange(len(shards)))
    if split != "train" or not shards.manifest.is_shuffled:
        return stored
    windows = np.empty_like(stored)
    windows[np.argsort(window_keys(0, len(stored), int(shards.manifest.request["--seed"] or 0)), kind="stable")] = (
        stored
    )
    return windows


def _stream(out: Path, split: str) -> list[int]:
    """The split's tokens: every window without the token that it shares with the next."""
    windows = _windows_of_the_text(out, split)
    assert np.array_equal(windows[:-1, -1], windows[1:, 0])
    return [*windows[:, :-1].reshape(-1).tolist(), int(windows[-1, -1])]


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "lock" not in p.name
    }


def _documents_of(tokens: list[int], manifest: Manifest) -> list[list[int]]:
    """Token ids of each document in a stream that ends with end-of-text."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == manifest.eot_token:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_documents_round_trip_exactly(write_documents: WriteDocuments, tmp_path: Path, compression: str) -> None:
    texts = write_documents(tmp_path / "in.jsonl", 150)
    options = PrepareOptions(seq_len=16, val_fraction=0.1, shard_bytes=4096, compression=compression)
    manifest = _prepare(tmp_path / "in.jsonl", tmp_path / "set", options).manifest
    assert len(manifest.splits["train"].shards) > 3
    paths: list[str] = []
    tokenizer = load_tokenizer("bytes")
    for name, split in manifest.splits.items():
        tokens = _stream(tmp_path / "set", name)
        assert len(tokens) + split.tail_tokens == split.num_tokens
        assert 0 <= split.tail_tokens < options.seq_len
        assert split.max_token_id == max(tokens) == manifest.eot_token
        complete = [tokenizer.decode(document) for document in _documents_of(tokens, manifest)[:-1]]
        assert split.num_documents - len(complete) <= split.tail_tokens
        paths += complete
    assert set(paths) <= set(texts)
    assert len(paths) == len(set(paths)) >= len(texts) - 10
    assert sum(split.num_documents for split in manifest.splits.values()) == len(texts)
    assert sum(split.num_text_bytes for split in manifest.splits.values()) == sum(len(t.encode()) for t in texts)


@pytest.mark.parametrize(("seq_len", "num_tokens"), [(4, 5), (4, 8), (4, 9), (4, 10), (1, 2), (1, 7)])
def test_no_token_is_lost_or_twice_but_the_tail(tmp_path: Path, seq_len: int, num_tokens: int) -> None:
    (tmp_path / "in.txt").write_bytes(bytes(range(97, 97 + num_tokens - 1)))
    manifest = _prepare(tmp_path / "in.txt", tmp_path / "set", PrepareOptions(seq_len=seq_len, val_fraction=0)).manifest
    train = manifest.splits["train"]
    assert (train.num_tokens, train.num_samples) == (num_tokens, (num_tokens - 1) // seq_len)
    expected = [*range(97, 97 + num_tokens - 1), 256]
    assert _stream(tmp_path / "set", "train") == expected[: num_tokens - train.tail_tokens]
    assert train.tail_tokens == (num_tokens - 1) % seq_len


class _WideTokenizer(Tokenizer):
    """Ids beyond uint16, one per character."""

    def __init__(self) -> None:
        self.spec, self.sha256, self.newline_is_a_border = "wide", "0" * 64, True
        self.vocab_size, self.eot_token = 1_200_000, 1_199_999

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # type: ignore[override]
        return [np.array([ord(character) for character in text], np.uint32) for text in texts]

    def decode(self, ids: list[int]) -> str:  # type: ignore[override]
        return "".join(map(chr, ids))

    def tokens(self) -> dict[int, str]:
        return {}

    def save(self, folder: Path) -> str:
        return ""


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a🙂b" * 30)
    options = PrepareOptions(seq_len=4, val_fraction=0)
    manifest = prepare(
        open_source(str(tmp_path / "in.txt")), tmp_path / "set", _WideTokenizer(), options, num_workers=1
    ).manifest
    assert manifest.dtype == "uint32"
    assert _stream(tmp_path / "set", "train")[:6] == [97, 0x1F642, 98, 97, 0x1F642, 98]


def test_number_of_workers_changes_nothing(write_documents: WriteDocuments, tmp_path: Path) -> None:
    write_documents(tmp_path / "in.jsonl", 300)
    # A document long enough to be cut into pieces.
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write(json.dumps({"text": "line with some words\n" * 40_000}) + "\n")
    for workers in (1, 3):
        _prepare(tmp_path / "in.jsonl", tmp_path / f"set{workers}", workers=workers)
    assert _files(tmp_path / "set1") == _files(tmp_path / "set3")


def test_copies_of_a_document_stay_in_one_split(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document number {number} " * 3}) + "\n" for number in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(lines * 2))
    options = PrepareOptions(seq_len=8, val_fraction=0.3)
    manifest = _prepare(tmp_path / "in.jsonl", tmp_path / "set", options).manifest
    assert all(split.num_documents % 2 == 0 for split in manifest.splits.values())


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n{"text": "some text here"}\n{"text": ""}\n')
    manifest = _prepare(tmp_path / "in.jsonl", tmp_path / "set", PrepareOptions(seq_len=4)).manifest
    assert manifest.empty_documents == 2
    assert manifest.splits["train"].num_documents == 1


def test_unigram_entropy() -> None:
    assert unigram_entropy_nats(np.array([5, 5, 0, 5, 5])) == pytest.approx(np.log(4))
    assert unigram_entropy_nats(np.array([0, 9])) == 0


def test_every_shard_is_a_random_part_of_the_text(write_documents: WriteDocuments, tmp_path: Path) -> None:
    """Of train; validation stays in the order of the text. The windows are those of the text, each once."""
    (first, *_) = write_documents(tmp_path / "in.jsonl", 400)
    # The first document goes to val, so that the order before it is the text's.
    seed = next(seed for seed in range(1000) if split_scores([hash_text(first)], seed)[0] < SMALL.val_fraction)
    options = dataclasses.replace(SMALL, seed=seed)
    shuffled = _prepare(tmp_path / "in.jsonl", tmp_path / "shuffled", options).manifest
    options = dataclasses.replace(options, shuffle=False)
    in_order = _prepare(tmp_path / "in.jsonl", tmp_path / "in_order", options).manifest
    assert (shuffled.is_shuffled, in_order.is_shuffled) == (True, False)
    assert shuffled.splits["val"] == in_order.splits["val"]
    assert shuffled.fingerprint != in_order.fingerprint
    train = TokenShards(open_set(str(tmp_path / "in_order")), "train")
    text = train.read(np.arange(len(train)))
    stored = TokenShards(open_set(str(tmp_path / "shuffled")), "train").read(np.arange(len(train)))
    assert (stored == text).all(axis=1).mean() < 0.01
    assert np.array_equal(_windows_of_the_text(tmp_path / "shuffled", "train"), text)
    places = np.argsort(window_keys(0, len(text), seed))
    means = [
        part.mean()
        for part in np.split(places, np.cumsum([s.num_samples for s in shuffled.splits["train"].shards])[:-1])
    ]
    assert len(means) > 10
    assert np.std(means) < 0.1 * len(text)


def test_what_does_not_fit_into_memory_changes_nothing(
    write_documents: WriteDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "in.jsonl", 400)
    _prepare(tmp_path / "in.jsonl", tmp_path / "in_memory")
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(split_writer, "_BUFFER_TOKENS", 1000)
    monkeypatch.setattr(split_writer, "BUFFER_BYTES", 3000)
    _prepare(tmp_path / "in.jsonl", tmp_path / "spilled")
    assert _files(tmp_path / "in_memory") == _files(tmp_path / "spilled")


def test_a_disk_that_fills_during_the_shuffle_leaves_nothing(
    write_documents: WriteDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: WindowShuffle, run: Run) -> None:
        (self._scratch).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_documents(tmp_path / "in.jsonl", 60)
    monkeypatch.setattr(WindowShuffle, "write_run", fail)
    monkeypatch.setattr(split_writer, "_BUFFER_TOKENS", 10)
    monkeypatch.setattr(split_writer, "BUFFER_BYTES", 10)
    with pytest.raises(DataError, match=r"Cannot write .*set: No space left on device"):
        _prepare(tmp_path / "in.jsonl", tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_same_request_alone_is_reused(write_documents: WriteDocuments, tmp_path: Path) -> None:
    write_documents(tmp_path / "in.jsonl", 60)
    first = _prepare(tmp_path / "in.jsonl", tmp_path / "set")
    again = _prepare(tmp_path / "in.jsonl", tmp_path / "set")
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest == first.manifest
    other, ordered = (dataclasses.replace(SMALL, **change) for change in ({"seq_len": 8}, {"shuffle": False}))
    before = _files(tmp_path / "set")
    for options, words in ((other, r"--seq-len 16 there, 8 now.*--overwrite"), (ordered, "--no-shuffle False there")):
        with pytest.raises(DataError, match=words):
            _prepare(tmp_path / "in.jsonl", tmp_path / "set", options)
    write_documents(tmp_path / "in.jsonl", 61)
    with pytest.raises(DataError, match="contents of --input"):
        _prepare(tmp_path / "in.jsonl", tmp_path / "set")
    assert _files(tmp_path / "set") == before
    assert _prepare(tmp_path / "in.jsonl", tmp_path / "set", other, overwrite=True).manifest.seq_len == 8
    assert load_manifest(tmp_path / "set").seq_len == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "set"]
    (tmp_path / "set" / "train" / "shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds is missing.*--overwrite"):
        _prepare(tmp_path / "in.jsonl", tmp_path / "set", other)


def test_somebody_elses_folder_is_never_replaced(write_documents: WriteDocuments, tmp_path: Path) -> None:
    write_documents(tmp_path / "in.jsonl", 60)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear to me")
    with pytest.raises(DataError, match="not a prepared dataset, so it will not be replaced"):
        _prepare(tmp_path / "in.jsonl", tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "dear to me"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seq_len": 0}, "--seq-len must be at least 1, not 0"),
        ({"val_fraction": 0.7}, r"--val-fraction must be in \[0, 0\.5\], not 0\.7"),
        ({"shard_bytes": 100}, "cannot hold windows of seq_len 1024"),
        ({"shard_bytes": 1 << 32}, "less than 4 GiB"),
    ],
)
def test_impossible_options(options: dict[str, int], text: str) -> None:
    with pytest.raises(DataError, match=text):
        PrepareOptions(**options)


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("tiny")
    with pytest.raises(DataError, match="train split holds 5 tokens in 1 documents, less than one window of 1025"):
        _prepare(tmp_path / "in.txt", tmp_path / "set", PrepareOptions())
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("name", ["in.txt", "in.csv", "in.jsonl"])
def test_no_text_at_all(name: str, tmp_path: Path) -> None:
    """A shorter seq_len would not help."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"in\.\w+ has no text: it holds no documents"):
        _prepare(tmp_path / name, tmp_path / "set", PrepareOptions())


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_text_of_few_documents_is_cut_for_validation(tmp_path: Path, suffix: str) -> None:
    """One document; and one beside others that fill no window."""
    text = "".join(f"sentence number {number}. " for number in range(400))
    lines = [json.dumps({"text": part}) for part in ("ab", text, "cd")]
    (tmp_path / f"in.{suffix}").write_text(text if suffix == "txt" else "\n".join(lines))
    options = PrepareOptions(seq_len=32, val_fraction=0.1)
    prepared = _prepare(tmp_path / f"in.{suffix}", tmp_path / "set", options)
    splits = prepared.manifest.splits
    num_tokens = sum(split.num_tokens for split in splits.values())
    assert splits["val"].num_tokens == pytest.approx(0.1 * num_tokens, abs=1)
    assert sum(split.num_text_bytes for split in splits.values()) == len(text) + (4 if suffix == "jsonl" else 0)
    train, val = (bytes(t for t in _stream(tmp_path / "set", split) if t < 256) for split in ("train", "val"))
    assert 0.88 < text.encode().index(val[:100]) / len(text) < 0.91, "the end of the text"
    assert train[:100] not in val
    assert "too few documents" in prepared.note


@pytest.mark.parametrize(("suffix", "normalizer"), [("txt", None), ("jsonl", "NFKC")])
def test_each_part_of_a_cut_document_has_the_bytes_of_its_own_tokens(
    tmp_path: Path, suffix: str, normalizer: str | None
) -> None:
    """The first nine tenths have words that the tokenizer knows, the end has none."""
    known = "the same words again and again. " * 600
    unknown = "".join(f"{number * 7919:x}q\u2460\u00fc" for number in range(400))
    (tmp_path / "words.txt").write_text(known)
    tokenizer = train_tokenizer(open_source(str(tmp_path / "words.txt")), tmp_path / "own", 270)
    if normalizer:
        stored = json.loads((tmp_path / "own" / "tokenizer.json").read_text())
        stored["normalizer"] = {"type": normalizer}
        (tmp_path / "own" / "tokenizer.json").write_text(json.dumps(stored))
        tokenizer = load_tokenizer(str(tmp_path / "own"))
    lines = [json.dumps({"text": part}) for part in ("ab", known + unknown, "cd")]
    (tmp_path / f"in.{suffix}").write_text(known + unknown if suffix == "txt" else "\n".join(lines))
    out = tmp_path / "set"
    manifest = _prepare(
        tmp_path / f"in.{suffix}", out, PrepareOptions(seq_len=32, val_fraction=0.3), tokenizer=str(tmp_path / "own")
    ).manifest
    val, total = manifest.splits["val"], sum(split.num_text_bytes for split in manifest.splits.values())
    decoded = tokenizer.decode([token for token in _stream(out, "val") if token != manifest.eot_token])
    # The tail fills no window, and a character may be cut.
    per_token = len(decoded.encode()) / (val.num_tokens - val.tail_tokens)
    assert val.num_text_bytes == pytest.approx(per_token * val.num_tokens, rel=0.03)
    assert total == len((known + unknown).encode()) + (4 if suffix == "jsonl" else 0)
    assert manifest.splits["train"].bytes_per_token > 1.5 * val.bytes_per_token
    assert manifest.note_on_bytes == ""


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_bytes_for_bits_per_byte_are_those_of_the_targets_alone(tmp_path: Path, packing: str) -> None:
    """Neither the tail, nor what packing crops, nor the first token of a window has a loss."""
    words = "the same words again and again. "
    lines = [json.dumps({"text": part}) for part in (words * 9, "0123456789" * 5, words, "9876543210" * 3) * 3]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.txt").write_text(words * 40)
    train_tokenizer(open_source(str(tmp_path / "words.txt")), tmp_path / "own", 270)
    options = PrepareOptions(seq_len=24, val_fraction=0.25, packing=packing)
    out = tmp_path / "set"
    manifest = _prepare(tmp_path / "in.jsonl", out, options, tokenizer=str(tmp_path / "own")).manifest
    tokenizer = load_tokenizer(str(tmp_path / "own"))
    shards, split = TokenShards(open_set(str(out)), "val"), manifest.splits["val"]
    targets = shards.read(np.arange(len(shards)))[:, 1:].ravel().tolist()
    text = tokenizer.decode([token for token in targets if token != manifest.eot_token])
    assert split.num_target_bytes == len(text.encode())
    assert manifest.bytes_per_target("val") == len(text.encode()) / len(targets) != split.bytes_per_token
    older = dataclasses.replace(
        manifest, splits={name: dataclasses.replace(s, num_target_bytes=None) for name, s in manifest.splits.items()}
    )
    assert older.bytes_per_target("val") == manifest.splits["val"].bytes_per_token
    assert older.bytes_per_target("test") is None


def test_an_older_set_says_that_its_bytes_are_an_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("the same words again and again. " * 600 + "0123456789" * 100)
    train_tokenizer(open_source(str(tmp_path / "in.txt")), tmp_path / "own", 270)
    out = tmp_path / "set"
    _prepare(tmp_path / "in.txt", out, PrepareOptions(seq_len=32), tokenizer=str(tmp_path / "own"))
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["counts_own_bytes"]
    splits = manifest["splits"].values()
    average = sum(split["num_text_bytes"] for split in splits) / (sum(split["num_tokens"] for split in splits) - 1)
    for split in splits:
        split["num_text_bytes"] = round(average * split["num_tokens"])
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert main(["data", "inspect", str(out)]) == 0
    assert "are an average of training and validation text" in " ".join(capsys.readouterr().out.split())


def test_no_shuffle_keeps_the_order_of_the_text(write_documents: WriteDocuments, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "in.jsonl", 60)
    places = {document: place for place, document in enumerate(documents)}
    for seed in range(2):
        options = dataclasses.replace(SMALL, shuffle=False, val_fraction=0.2, seed=seed)
        _prepare(tmp_path / "in.jsonl", tmp_path / f"set{seed}", options)
        manifest = load_manifest(tmp_path / f"set{seed}")
        for split in ("train", "val"):
            read = _documents_of(_stream(tmp_path / f"set{seed}", split), manifest)[:-1]
            order = [places[bytes(tokens).decode()] for tokens in read]
            assert order == sorted(order)


def test_the_set_keeps_its_tokenizer(write_documents: WriteDocuments, tmp_path: Path) -> None:
    ranks = tmp_path / "own.tiktoken"
    from llmscale.data.tokenizers.tokenizer import TiktokenTokenizer

    made = TiktokenTokenizer("own", {bytes([value]): value for value in range(256)} | {b"ei": 256})
    (tmp_path / made.save(tmp_path)).rename(ranks)
    write_documents(tmp_path / "in.jsonl", 60)
    _prepare(tmp_path / "in.jsonl", tmp_path / "set", tokenizer=str(ranks))
    ranks.unlink()
    (tmp_path / "set").rename(tmp_path / "moved")
    tokenizer = load_set_tokenizer(tmp_path / "moved")
    assert tokenizer.encode("ein") == [256, ord("n")]
    stored = tmp_path / "moved" / "tokenizer" / "ranks.tiktoken"
    stored.write_text("".join(stored.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match=r"is not the tokenizer with which .* was prepared"):
        load_set_tokenizer(tmp_path / "moved")
