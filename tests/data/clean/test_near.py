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
    find_exact_key,
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
    hashes = [Text(text).word_hashes for text in texts]
    sketches = [sketch(hashes[begin : begin + batch], SETTINGS) for begin in range(0, len(texts), batch)]
    index = NearIndex(SETTINGS, np.concatenate([part.band_keys for part in sketches]).T)
    minima = [row for part in sketches for row in part.minima]
    return [index.decide(number, number, row) for number, row in enumerate(minima)]


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


def test_batches_change_nothing(make_prose: MakeProse) -> None:
    rng = random.Random(2)
    texts = [make_prose(rng, 80) for _ in range(150)]
    texts += [_edit(rng.choice(texts), 0.03, rng) for _ in range(150)]
    rng.shuffle(texts)
    expected = _decide(texts, 300)
    assert sum(decision is not None for decision in expected) > 100
    assert _decide(texts, 7) == expected == _decide(texts, 1)


def test_what_is_near_only_to_a_removed_document_stays() -> None:
    words = [f"w{number}" for number in range(300)]
    steps = [" ".join([*(f"x{number}" for number in range(changed)), *words[changed:]]) for changed in (0, 60, 120)]
    first, second, third = _decide(steps, 3)
    assert first is None and second is not None and third is None


def test_short_and_strange_texts() -> None:
    texts = ["one", "One!", "two words", "two words.", "数据数据很好的文本", "数据,数据很好的文本。"]
    assert [decision is not None for decision in _decide(texts)] == [False, True, False, True, False, True]


def test_index_takes_the_bytes_that_are_stated(make_prose: MakeProse) -> None:
    rng = random.Random(3)
    sketches = sketch([Text(make_prose(rng, 60)).word_hashes for _ in range(50)] * 2, SETTINGS)
    index = NearIndex(SETTINGS, sketches.band_keys.T)
    size = sum(array.nbytes for array in (index._offsets, index._begins, index._slots, index._minima))
    assert size + 100 * index._numbers.itemsize == 100 * index_bytes_per_document(["near"], SETTINGS) + 8


def test_decisions_are_those_of_a_comparison_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_MOST_COMPARED", 5)
    rng, settings = np.random.default_rng(0), NearSettings(permutations=8, bands=3, threshold=0.5)
    keys, minima = rng.integers(0, 40, (3, 300), np.uint32), rng.integers(0, 3, (300, 8), np.uint8)
    index, remaining, removed = NearIndex(settings, keys), list[int](), 0
    for number in range(300):
        candidates = [other for other in remaining if (keys[:, other] == keys[:, number]).any()][:5]
        similar = ((minima[candidates] == minima[number]).mean(axis=1) - 1 / 256) / (1 - 1 / 256) >= 0.5
        expected = next((other for other, is_near in zip(candidates, similar, strict=True) if is_near), None)
        # One removed by another step is passed over.
        decision = index.decide(number, number, minima[number]) if number % 7 else None
        if number % 7:
            assert (decision.why["duplicate_of"] if decision else None) == expected
            removed += expected is not None
            remaining += [] if decision else [number]
    assert 50 < removed < 250


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
