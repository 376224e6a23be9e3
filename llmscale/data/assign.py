"""Which split a document goes to: a function of its text and the seed, so copies stay together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


def split_score(text_hash: bytes, seed: int) -> float:
    """Uniform in [0, 1) over documents; below val_fraction means val."""
    digest = hashlib.blake2b(text_hash, digest_size=8, key=seed.to_bytes(16, "little", signed=True)).digest()
    return int.from_bytes(digest, "little") / 2**64


class SplitAssigner(Generic[_T]):
    """Sends documents to train or val by score; of two or more different documents at least one goes to val.

    While no document has scored below `val_fraction`, the one with the lowest score so far is held back, with the
    number of its copies: it goes to val if none does until the end. So one document is kept in memory, not the corpus.
    """

    def __init__(self, val_fraction: float) -> None:
        self._val_fraction = val_fraction
        self._has_val = val_fraction == 0
        self._held: list[_T] = []
        self._held_score = 1.0
        self._has_others = False

    def assign(self, score: float, document: _T) -> Iterator[tuple[str, _T]]:
        """The documents whose split is now known."""
        if self._has_val or score < self._val_fraction:
            yield from self._release("train")
            self._has_val = True
            yield ("val" if score < self._val_fraction else "train"), document
        elif score < self._held_score:
            yield from self._release("train")
            self._held, self._held_score = [document], score
        elif score == self._held_score:
            self._held.append(self._held[0])
        else:
            self._has_others = True
            yield "train", document

    def finish(self) -> Iterator[tuple[str, _T]]:
        """What was held back, if anything; a corpus of one document is all train."""
        yield from self._release("val" if self._has_others else "train")

    def _release(self, split: str) -> Iterator[tuple[str, _T]]:
        self._has_others |= bool(self._held)
        for document in self._held:
            yield split, document
        self._held = []
