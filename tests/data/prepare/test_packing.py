"""Best-fit packing: rows start at documents, no token is used twice, and what is lost is counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.prepare import packing
from llmscale.data.prepare.packing import BestFitPacking, PackingState
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError

EOT, T = 0, 31
EMPTY = PackingState(np.zeros(0, np.uint32))


def make_documents(num_documents: int, seed: int) -> list[np.ndarray]:
    """Documents of 1 to 200 tokens, each of which occurs once, and end-of-text."""
    rng = random.Random(seed)
    ids = iter(range(1, 10**6))
    return [
        np.array([*(next(ids) for _ in range(rng.choice((1, 5, 20, 30, 31, 62, 200)) - 1)), EOT], np.uint32)
        for _ in range(num_documents)
    ]


def pack(documents: list[np.ndarray], group: int, *, reopens: bool = False) -> tuple[np.ndarray, BestFitPacking]:
    """Pack documents, `group` at a time."""
    packed, rows = BestFitPacking(T, "uint32", EOT, EMPTY), []
    for begin in range(0, len(documents), group):
        rows.append(packed.cut(np.concatenate(documents[begin : begin + group])))
        if reopens:
            packed = BestFitPacking(T, "uint32", EOT, packed.state())
    return np.concatenate([*rows, packed.finish()]), packed


def test_rows_start_at_documents_and_use_each_token_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MOST_WAITING", 20)
    documents = make_documents(400, seed=1)
    rows, packed = pack(documents, 7)
    first_tokens = {int(document[0]) for document in documents}
    inputs, targets = Counter(rows[:, :-1].ravel().tolist()), Counter(rows[:, 1:].ravel().tolist())
    assert max(count for token, count in inputs.items() if token != EOT) == 1
    assert max(count for token, count in targets.items() if token != EOT) == 1
    # A row starts at a document, or continues one where the row before ended, or holds only ends of documents.
    last_tokens = {int(row[-1]) for row in rows}
    others = [row for row in rows if int(row[0]) not in first_tokens | last_tokens]
    assert len(others) < len(rows) / 20
    used = set(rows.ravel().tolist())
    lost = sum(map(len, documents)) - np.isin(np.concatenate(documents), [*used - {EOT}]).sum()
    assert lost - np.sum(rows == EOT) == packed.num_cropped + packed.num_tail
    assert packed.num_tail <= T
    for document in documents:
        if len(document) > T:
            # What does not fit into a row of a long document is in consecutive rows.
            assert used.issuperset(document[: (len(document) - 1) // T * T + 1].tolist())


def test_rows_do_not_depend_on_groups_of_documents_or_on_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MOST_WAITING", 20)
    documents = make_documents(300, seed=2)
    rows, packed = pack(documents, 300)
    again, reopened = pack(documents, 11, reopens=True)
    assert np.array_equal(rows, again)
    assert (packed.num_cropped, packed.num_tail) == (reopened.num_cropped, reopened.num_tail)


def test_the_waiting_documents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MOST_WAITING_TOKENS", 2000)
    packed = BestFitPacking(T, "uint32", EOT, EMPTY)
    for document in make_documents(2000, seed=3):
        packed.cut(document)
        assert packed.num_tail <= 2000


def test_a_set_says_what_it_lost(write_documents: Callable[..., list[str]], tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "in.jsonl", 300)
    options = PrepareOptions(seq_len=256, val_fraction=0.1, packing="best-fit")
    source, tokenizer = open_source(str(tmp_path / "in.jsonl")), load_tokenizer("bytes")
    manifest = prepare(source, tmp_path / "set", tokenizer, options).manifest
    train = manifest.splits["train"]
    rows = TokenShards(open_set(str(tmp_path / "set")), "train").read(np.arange(train.num_samples))
    # Every text is shorter than a row.
    beginnings = {(text + " ").encode()[:3] for text in texts}
    assert all(row[:3].astype(np.uint8).tobytes() in beginnings for row in rows)
    assert train.num_tokens == rows.size + train.cropped_tokens + train.tail_tokens
    assert 0 < train.cropped_tokens < train.num_tokens / 10
    with pytest.raises(DataError, match="--packing 'best-fit' there, 'stream' now"):
        prepare(source, tmp_path / "set", tokenizer, PrepareOptions(seq_len=256, val_fraction=0.1))
    text = (tmp_path / "set" / "manifest.json").read_text()
    altered = text.replace(f'"cropped_tokens": {train.cropped_tokens}', '"cropped_tokens": 99999')
    (tmp_path / "set" / "manifest.json").write_text(altered)
    with pytest.raises(DataError, match=r"tail_tokens \+ cropped_tokens is \d+, and must be \d+ to \d+"):
        open_set(str(tmp_path / "set"))
