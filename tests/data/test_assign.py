from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.assign import SplitAssigner, split_score


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


def test_no_val_when_none_is_wanted() -> None:
    assert _assign([0.0, 0.5], 0.0) == {"train": [0, 1], "val": []}


def test_scores_are_uniform_and_follow_seed_and_text() -> None:
    rng = random.Random(0)
    hashes = [rng.randbytes(64) for _ in range(4000)]
    scores = [split_score(text_hash, 1) for text_hash in hashes]
    assert sum(score < 0.1 for score in scores) / 4000 == pytest.approx(0.1, abs=0.02)
    assert scores == [split_score(text_hash, 1) for text_hash in hashes]
    assert scores[0] != split_score(hashes[0], 2)
