"""Prose that passes every filter, made of words that nobody has written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

_STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]
MakeProse = Callable[[random.Random, int], str]


def _vocabulary() -> list[str]:
    rng = random.Random(0)
    syllables = ["ba", "ne", "ri", "to", "lu", "sham", "gre", "vin", "ost", "kel", "pra", "dun"]
    return sorted({"".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(2000)})


@pytest.fixture(scope="session")
def make_prose() -> MakeProse:
    """A text of so many words, in sentences and paragraphs."""
    vocabulary = _vocabulary()

    def make(rng: random.Random, num_words: int) -> str:
        sentences: list[str] = []
        left = num_words
        while left > 0:
            length = min(left, rng.randint(8, 16))
            words = [rng.choice(_STOP_WORDS if rng.random() < 0.3 else vocabulary) for _ in range(length)]
            sentences.append(" ".join(words).capitalize() + ".")
            left -= length
        paragraphs = [" ".join(sentences[begin : begin + 6]) for begin in range(0, len(sentences), 6)]
        return "\n\n".join(paragraphs)

    return make


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, list[str]], Path]:
    def write(path: Path, texts: list[str]) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return path

    return write
