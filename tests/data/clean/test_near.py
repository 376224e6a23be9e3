"""Near duplicates are found, distinct documents stay, whatever the batches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmscale.data.clean import duplicates
from llmscale.data.clean.duplicates import (
    ExactIndex,
    NearIndex,
    NearSettings,
    SortedIndex,
    find_exact_key,
    find_repeated,
    index_bytes_per_document,
    sketch,
)
from llmscale.data.clean.filters import Removed, Text
from tests.data.clean.conftest import MakeProse

SETTINGS = NearSettings()


def _edit(text: str, share: float, rng: random.Random) -> str:
    """Some words replaced, left out or put in."""
    words = text.split(" ")
    for _ in range(max(1, round(share * len(words)))):
        place = rng.randrange(len(words))
        kind = rng.randrange(3)
        if kind == 0:
            words[place] = f"edit{rng.randrange(10**6)}"
        elif kind == 1 and len(words) > 1:
            del words[place]
        else:
            words.insert(place, f"edit{rng.randrange(10**6)}")
    return " ".join(words)


def _decide(texts: list[str], batch: int = 100) -> list[Removed | None]:
    index, decisions = NearIndex(SETTINGS), []
    for begin in range(0, len(texts), batch):
        sketches = sketch([Text(text).word_hashes for text in texts[begin : begin + batch]], SETTINGS)
        index.begin_batch(sketches)
        decisions += [index.decide(begin + row, row) for row in range(len(sketches))]
    return decisions


@pytest.mark.parametrize("share", [0.05, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.01, 0.03))])
def test_planted_edits_are_found_and_nothing_else(share: float, make_prose: MakeProse) -> None:
    rng = random.Random(1)
    originals = [make_prose(rng, rng.randint(100, 600)) for _ in range(400)]
    planted = [_edit(text, share, rng) for text in originals]
    decisions = _decide(originals + planted)
    assert decisions[:400] == [None] * 400
    duplicates = [decision for decision in decisions[400:] if decision is not None]
    assert len(duplicates) >= 0.95 * 400
    for number, decision in enumerate(decisions[400:]):
        assert decision is None or decision.why["duplicate_of"] == number


def test_batches_and_sorted_runs_change_nothing(make_prose: MakeProse, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    texts = [make_prose(rng, 80) for _ in range(150)]
    texts += [_edit(rng.choice(texts), 0.03, rng) for _ in range(150)]
    rng.shuffle(texts)
    expected = _decide(texts, 300)
    assert sum(decision is not None for decision in expected) > 100
    monkeypatch.setattr(duplicates, "_MOST_RECENT", 8)
    monkeypatch.setattr(duplicates, "_BLOCK_DOCUMENTS", 16)
    assert _decide(texts, 7) == expected == _decide(texts, 1)


def test_what_is_near_only_to_a_removed_document_stays() -> None:
    words = [f"w{number}" for number in range(300)]
    steps = [" ".join([*(f"x{number}" for number in range(changed)), *words[changed:]]) for changed in (0, 60, 120)]
    first, second, third = _decide(steps, 3)
    assert first is None and second is not None and third is None


def test_short_and_strange_texts() -> None:
    texts = ["one", "One!", "two words", "two words.", "数据数据很好的文本", "数据,数据很好的文本。"]
    assert [decision is not None for decision in _decide(texts)] == [False, True, False, True, False, True]


def test_index_takes_the_bytes_that_are_stated(make_prose: MakeProse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_MOST_RECENT", 1)
    monkeypatch.setattr(duplicates, "_BLOCK_DOCUMENTS", 50)
    rng = random.Random(3)
    index = NearIndex(SETTINGS)
    for number in range(101):
        index.begin_batch(sketch([Text(make_prose(rng, 60)).word_hashes], SETTINGS))
        if number < 100:
            index.decide(number, 0)
    runs = [run for band in index._bands for run in band._runs]
    size = sum(keys.nbytes + numbers.nbytes for keys, numbers in runs)
    size += sum(block.nbytes for block in index._blocks) + len(index._numbers) * index._numbers.itemsize
    assert size == 100 * index_bytes_per_document(["near"], SETTINGS)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_sorted_index_is_a_map_to_many(dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(0)
    index, entries = SortedIndex(), []
    for size in (5, 1, 1, 40, 3, 200, 1):
        keys = rng.integers(0, 60, size).astype(dtype)
        numbers = rng.integers(0, 1000, size).astype(np.uint32)
        index.add(keys, numbers)
        entries += list(zip(keys.tolist(), numbers.tolist(), strict=True))
    wanted = np.arange(70).astype(dtype)
    places, numbers = index.find(wanted)
    assert sorted(zip(places.tolist(), numbers.tolist(), strict=True)) == sorted(entries)
    assert len(index) == len(entries) == 251 and len(index._runs) <= 8


def test_exact_duplicates_are_found() -> None:
    rng = random.Random(4)
    texts = [f"text {rng.randrange(400)}" for _ in range(200)]
    keys = [find_exact_key(Text(text)).key for text in texts]
    index, first = ExactIndex(np.array(keys, np.uint64)), dict[str, int]()
    for number, key in enumerate(keys):
        original = first.setdefault(texts[number], number)
        decision = index.decide(number, key)
        assert (decision is None) == (original == number)
        assert decision is None or decision.why["duplicate_of"] == original
    assert find_exact_key(Text("a  b\n")) == find_exact_key(Text(" a b")) != find_exact_key(Text("ab"))


def test_repeated_keys_are_all_found() -> None:
    keys = np.random.default_rng(0).integers(0, 300, 400, np.uint64)
    values, counts = np.unique(keys, return_counts=True)
    expected = np.isin(keys, values[counts > 1])
    assert expected.any() and not expected.all()
    np.testing.assert_array_equal(find_repeated(keys), expected)
    assert find_repeated(keys[:0]).shape == (0,)
