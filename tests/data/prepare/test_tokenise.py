"""Documents go to train or val by their text; batches come in order, no more of them in memory than agreed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.prepare.tokenise import (
    READ_AHEAD,
    SplitAssigner,
    hash_text,
    hash_tokens,
    ordered_parallel_map,
    split_scores,
)
from tests.conftest import HANG_S


def test_scores_are_uniform_and_follow_seed_and_text() -> None:
    rng = random.Random(0)
    texts = [str(rng.random()) for _ in range(4000)]
    scores = split_scores([hash_text(text) for text in texts], 1)
    assert (scores < 0.1).mean() == pytest.approx(0.1, abs=0.02)
    assert scores.min() >= 0 and scores.max() < 1
    assert scores[7] == split_scores([hash_text(texts[7])], 1)[0]
    others = split_scores([hash_text(text) for text in texts], 2)
    assert abs(np.corrcoef(scores, others)[0, 1]) < 0.1


def test_tokens_are_hashed_apart_from_texts() -> None:
    tokens = np.array([97, 98], np.uint32)
    assert hash_tokens(tokens) == hash_tokens(tokens.astype(np.uint16)) != hash_text(tokens.tobytes().decode())


@dataclass(frozen=True)
class Numbers:
    """A document whose tokens can be told from all others."""

    name: int
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first + 1

    def cut_at(self, num_tokens: int) -> tuple[Numbers, Numbers]:
        middle = self.first + num_tokens
        assert self.first <= middle <= self.end
        return Numbers(self.name, self.first, middle), Numbers(self.name, middle, self.end)


def _assign(
    documents: list[tuple[float, int]], fraction: float, window: int, *, keeps_order: bool = True
) -> tuple[dict[str, list[Numbers]], str]:
    """Return the documents of each split, given their scores and sizes, and the note."""
    assigner = SplitAssigner(fraction, window, Numbers.cut_at, keeps_order=keeps_order)
    splits: dict[str, list[Numbers]] = {"train": [], "val": []}
    for name, (score, size) in enumerate(documents):
        document = Numbers(name, 0, size)
        is_val = assigner.is_val(np.array([score]))[0]
        assigned = [("val" if is_val else "train", document)]
        for split, part in assigned if assigner.is_settled else assigner.add(score, document):
            splits[split].append(part)
    for split, part in assigner.finish():
        splits[split].append(part)
    return splits, assigner.note


def _count(parts: list[Numbers]) -> int:
    return sum(part.num_tokens for part in parts)


@given(
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 60)), min_size=1, max_size=12),
    st.floats(0.001, 0.5),
    st.integers(2, 40),
    st.booleans(),
)
def test_both_splits_hold_a_window_wherever_there_is_text_enough(
    documents: list[tuple[float, int]], fraction: float, window: int, keeps_order: bool
) -> None:
    splits, note = _assign(documents, fraction, window, keeps_order=keeps_order)
    tokens = [
        (part.name, token) for parts in splits.values() for part in parts for token in range(part.first, part.end)
    ]
    assert len(set(tokens)) == len(tokens) == sum(size for _, size in documents), "no token is lost or there twice"
    if sum(size + 1 for _, size in documents) >= 2 * window:
        assert min(map(_count, splits.values())) >= window
    if not note:
        assert all(
            (documents[part.name][0] < fraction) == (part in splits["val"])
            for parts in splits.values()
            for part in parts
        )
    if note or keeps_order:
        assert all([part.name for part in split] == sorted(part.name for part in split) for split in splits.values())


def test_a_good_split_is_by_score_and_in_order() -> None:
    documents = [(0.9, 50), (0.05, 30), (0.5, 9), (0.01, 400), (0.2, 3)]
    splits, note = _assign(documents, 0.1, 20)
    assert [[part.name for part in parts] for parts in splits.values()] == [[0, 2, 4], [1, 3]] and note == ""
    assert _assign(documents, 0.0, 20)[0]["val"] == []


def test_the_order_of_a_shuffled_set_is_that_of_older_versions() -> None:
    """A document with the lowest score so far comes last of those before the next such one."""
    documents = [(0.9, 9), (0.5, 9), (0.7, 9), (0.5, 9), (0.3, 9), (0.8, 9), (0.05, 30), (0.2, 9)]
    splits, _ = _assign(documents, 0.1, 20, keeps_order=False)
    assert [part.name for part in splits["train"]] == [0, 2, 1, 3, 5, 4, 7]


@pytest.mark.parametrize("scores", [(0.5, 0.5), (0.5, 0.01), (0.01, 0.5)])
def test_without_a_good_split_validation_is_the_end_of_the_text(scores: tuple[float, float]) -> None:
    splits, note = _assign([(scores[0], 900), (scores[1], 900)], 0.05, 20)
    balanced = scores[0] != scores[1]
    assert _count(splits["val"]) == (901 if balanced else round(0.05 * 1802))
    assert ("too few documents" in note) != balanced


def test_a_document_that_is_most_of_the_text_is_not_all_for_validation() -> None:
    splits, note = _assign([(0.5, 300), (0.01, 900)], 0.05, 20)
    assert _count(splits["val"]) == round(0.05 * 1202) and "too few documents" in note


def test_documents_do_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmscale.data.prepare.tokenise.MOST_WAITING_TOKENS", 1000)
    splits, note = _assign([(0.5, 99)] * 20, 0.05, 20)
    assert [part.name for part in splits["val"]] == [10] and "the text's first 1,100 tokens" in note


@pytest.mark.parametrize(("weight", "most"), [(1, 2 * READ_AHEAD), (2, READ_AHEAD), (100, 1)])
def test_large_batches_do_not_pile_up(weight: int, most: int) -> None:
    """One more is read, and waits for its place."""
    read: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(20):
            read.append(number)
            yield number

    done = []
    for result in ordered_parallel_map(batches(), str, 1, weigh=lambda _: weight):
        time.sleep(0.005)
        assert len(read) <= len(done) + most + 1
        done.append(result)
    assert done == [str(number) for number in range(20)]


def test_what_reading_and_working_raise_is_raised_in_its_place() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    results = ordered_parallel_map(batches(), lambda number: 10 // number, 2, weigh=lambda _: 50)
    assert next(results) == 10
    with pytest.raises(OSError, match="gone"):
        next(results)
    with pytest.raises(ZeroDivisionError):
        next(ordered_parallel_map([0], lambda number: 10 // number, 2))


def test_what_is_read_from_is_closed_when_nothing_more_is_wanted() -> None:
    is_closed = threading.Event()

    def batches() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            is_closed.set()

    held = batches()
    results = ordered_parallel_map(held, str, 1)
    assert next(results) == "0"
    results.close()
    assert is_closed.wait(HANG_S)
