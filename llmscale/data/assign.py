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
    """Sends documents to train or val by score; of two or more documents at least one goes to val.

    While no document has scored below `val_fraction`, the one with the lowest score so far is held back: it
    goes to val if none does until the end. So one document is kept in memory, not the corpus.
    """

    def __init__(self, val_fraction: float) -> None:
        self._val_fraction = val_fraction
        self._has_val = val_fraction == 0
        self._candidate: tuple[float, _T] | None = None
        self._num_documents = 0

    def assign(self, score: float, document: _T) -> Iterator[tuple[str, _T]]:
        """The documents whose split is now known."""
        self._num_documents += 1
        if self._has_val or score < self._val_fraction:
            yield from self._release()
            self._has_val = True
            yield ("val" if score < self._val_fraction else "train"), document
        elif self._candidate is None:
            self._candidate = (score, document)
        elif score < self._candidate[0]:
            yield "train", self._candidate[1]
            self._candidate = (score, document)
        else:
            yield "train", document

    def finish(self) -> Iterator[tuple[str, _T]]:
        """The document that was held back, if any. A single document is always train."""
        if self._candidate is not None:
            yield ("val" if self._num_documents > 1 else "train"), self._candidate[1]
            self._candidate = None

    def _release(self) -> Iterator[tuple[str, _T]]:
        if self._candidate is not None:
            yield "train", self._candidate[1]
            self._candidate = None
