from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.prepare.train_val_split import (
    SplitAssigner,
    ValidationKeeper,
    hash_text,
    hash_tokens,
    split_scores,
)


def _assign(scores: list[float], val_fraction: float) -> dict[str, list[int]]:
    assigner = SplitAssigner[int](val_fraction)
    assigned = [pair for number, score in enumerate(scores) for pair in assigner.assign(score, number)]
    assigned += assigner.finish()
    return {split: sorted(n for where, n in assigned if where == split) for split in ("train", "val")}


@given(st.lists(st.floats(0, 0.999), max_size=30, unique=True), st.floats(0.001, 0.5))
def test_every_document_once_and_at_least_one_for_val(scores: list[float], val_fraction: float) -> None:
    splits = _assign(scores, val_fraction)
    assert sorted(splits["train"] + splits["val"]) == list(range(len(scores)))
    chosen = [n for n, score in enumerate(scores) if score < val_fraction]
    lowest = [scores.index(min(scores))] if len(scores) > 1 else []
    assert splits["val"] == (chosen or lowest)


def test_copies_of_the_document_that_is_held_back_stay_together() -> None:
    splits = _assign([0.9, 0.4, 0.7, 0.4, 0.4], 0.1)
    assert (len(splits["train"]), len(splits["val"])) == (2, 3)
    assert _assign([0.4] * 4, 0.1)["val"] == []


@given(st.lists(st.sampled_from([0.02, 0.2, 0.3, 0.5, 0.7, 0.9]), max_size=20), st.sampled_from([0.001, 0.1, 0.25]))
def test_the_order_of_the_text_is_kept_where_it_is_wanted(scores: list[float], val_fraction: float) -> None:
    found = {}
    for keeps_order in (False, True):
        assigner = SplitAssigner[tuple[float, int]](val_fraction, keeps_order=keeps_order)
        assigned = [pair for number, score in enumerate(scores) for pair in assigner.assign(score, (score, number))]
        found[keeps_order] = [*assigned, *assigner.finish()]
    splits = {split: [document for where, document in found[True] if where == split] for split in ("train", "val")}
    for split, documents in splits.items():
        # Copies of a document that is held back are one object.
        assert sorted(score for score, _ in documents) == sorted(s for where, (s, _) in found[False] if where == split)
    is_val = [score in [score for score, _ in splits["val"]] for score in scores]
    for split, wanted in (("train", False), ("val", True)):
        assert [s for s, _ in splits[split]] == [s for s, val in zip(scores, is_val, strict=True) if val == wanted]


def test_no_val_when_none_is_wanted() -> None:
    assert _assign([0.0, 0.5], 0.0) == {"train": [0, 1], "val": []}


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
    def text_hash(self) -> bytes:
        return str(self.name).encode()

    @property
    def num_tokens(self) -> int:
        return self.end - self.first + 1

    def cut_at(self, num_tokens: int) -> tuple[Numbers, Numbers]:
        middle = self.first + num_tokens
        assert self.first <= middle <= self.end
        return Numbers(self.name, self.first, middle), Numbers(self.name, middle, self.end)


def _keep(sizes: list[tuple[str, int]], fraction: float, window: int) -> tuple[dict[str, list[Numbers]], str]:
    keeper = ValidationKeeper[Numbers](fraction, window, Numbers.cut_at)
    found: dict[str, list[Numbers]] = {"train": [], "val": []}
    added = [pair for name, (split, size) in enumerate(sizes) for pair in keeper.add(split, Numbers(name, 0, size))]
    for split, part in [*added, *keeper.finish()]:
        found[split].append(part)
    return found, keeper.note


def _count(parts: list[Numbers]) -> int:
    return sum(part.num_tokens for part in parts)


@given(
    st.lists(st.tuples(st.sampled_from(["train", "val"]), st.integers(1, 60)), min_size=1, max_size=12),
    st.floats(0.001, 0.5),
    st.integers(2, 40),
)
def test_both_splits_hold_a_window_wherever_there_is_text_enough(
    sizes: list[tuple[str, int]], fraction: float, window: int
) -> None:
    found, note = _keep(sizes, fraction, window)
    seen = {(part.name, token) for parts in found.values() for part in parts for token in range(part.first, part.end)}
    assert len(seen) == sum(size for _, size in sizes), "no token is lost"
    assert sum(part.end - part.first for parts in found.values() for part in parts) == len(seen), "or there twice"
    if sum(size + 1 for _, size in sizes) >= 2 * window:
        assert min(map(_count, found.values())) >= window or not note
        whole = {split: sum(size + 1 for where, size in sizes if where == split) for split in found}
        assert min(map(_count, found.values())) >= window or min(whole.values()) >= window
    if not note:
        assert all(part.first == 0 and part.end == sizes[part.name][1] for part in (*found["train"], *found["val"]))


def test_a_split_that_is_good_is_left_alone_and_in_order() -> None:
    sizes = [("train", 50), ("val", 30), ("train", 9), ("val", 400), ("train", 3)]
    found, note = _keep(sizes, 0.1, 20)
    assert [part.name for part in found["train"]] == [0, 2, 4]
    assert [part.name for part in found["val"]] == [1, 3]
    assert note == ""


def test_a_document_that_is_most_of_the_text_is_not_all_for_validation() -> None:
    found, note = _keep([("train", 300), ("val", 900)], 0.05, 20)
    assert _count(found["val"]) == round(0.05 * 1202)
    assert "too few documents" in note


def test_copies_of_the_only_document_are_cut_alike() -> None:
    keeper = ValidationKeeper[Numbers](0.1, 20, Numbers.cut_at)
    assert not [pair for _ in range(3) for pair in keeper.add("train", Numbers(0, 0, 199))]
    found = keeper.finish()
    assert found == [("train", Numbers(0, 0, 180)), ("val", Numbers(0, 180, 199))] * 3
