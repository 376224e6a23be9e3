"""Which split a document goes to: a function of its text and the seed, so copies stay together.

A text of one document, or of few and short ones, would have nothing to validate on: there its end is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.order.permutation import fold64, key64
from llmscale.data.tokenizers.tokenizer import TokenArray

_T = TypeVar("_T")
#: Tokens that are kept in memory while no window of validation has been found: 256 MiB.
MOST_WAITING_TOKENS = 1 << 26
#: What a document counts for besides its tokens, as Python keeps 330 bytes of each: 2 million of next to nothing wait.
_TOKENS_PER_DOCUMENT = 1 << 5
#: Keeps the hashes of tokens apart from those of texts.
_TOKENS_SEED = 0x70C5
#: Keeps the scores apart from the order's keys, should both have one seed.
_DOMAIN = 0x5B11_7C0D_E5A1_D09E


def hash_text(text: str) -> bytes:
    """Of a document's text, 128 bits."""
    return xxhash.xxh3_128_digest(text)


def hash_tokens(tokens: TokenArray) -> bytes:
    """Of a document that is known by its tokens alone, 128 bits."""
    return xxhash.xxh3_128_digest(tokens.astype("<u4").data, seed=_TOKENS_SEED)


def split_scores(text_hashes: Sequence[bytes], seed: int) -> NDArray[np.float64]:
    """Of each document, uniform in [0, 1); below val_fraction means val."""
    first_words = np.frombuffer(b"".join(text_hashes), "<u8")[::2]
    # The 53 bits that a float has room for: never 1.
    return (fold64(key64(seed, _DOMAIN), first_words) >> np.uint64(11)) / 2.0**53


@dataclass(frozen=True)
class Held(Generic[_T]):
    """A document that goes to val if no other does."""

    document: _T | None
    num_copies: int
    score: float
    has_others: bool
    """Whether there are documents besides."""


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

    @property
    def is_settled(self) -> bool:
        """Whether the score alone decides from now on."""
        return self._has_val

    def held(self) -> Held[_T]:
        """What is held back, for an assigner that goes on from here."""
        return Held(self._held[0] if self._held else None, len(self._held), self._held_score, self._has_others)

    def go_on(self, held: Held[_T] | None) -> None:
        """Be what an assigner was that held this; None for one that was settled."""
        if held is None:
            self._has_val = True
        else:
            self._held = [held.document] * held.num_copies if held.document is not None else []
            self._held_score, self._has_others = held.score, held.has_others

    def is_val(self, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which documents go to val, once the score alone decides."""
        return scores < self._val_fraction

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


class Text(Protocol):
    """A tokenised document."""

    @property
    def text_hash(self) -> bytes:
        """Equal for copies."""

    @property
    def num_tokens(self) -> int:
        """With the end-of-text token that follows."""

    def cut_at(self: _D, num_tokens: int) -> tuple[_D, _D]:
        """The first tokens, and the others."""


_D = TypeVar("_D", bound=Text)


class ValidationKeeper(Generic[_D]):
    """Sees to it that both splits hold a window and val is not most of the text, wherever there is text enough.

    Documents wait until that is so. When it never is, the last `val_fraction` of the text, at least one window, is for
    val, and the document in which it begins is cut; where all documents are copies of one, each is cut at the same
    place. A text that has no two windows is left as it is.
    """

    def __init__(self, val_fraction: float, window: int) -> None:
        self._val_fraction = val_fraction
        self._window = window
        self._waiting: list[tuple[str, _D]] = []
        self._num_tokens = {"train": 0, "val": 0}
        self.is_settled = val_fraction == 0
        """Whether documents pass without waiting from now on."""
        self.note = ""
        """What was done, when anything was."""

    def add(self, split: str, document: _D) -> Sequence[tuple[str, _D]]:
        """What need not wait any longer, in the order in which it came."""
        if self.is_settled:
            return [(split, document)]
        self._waiting.append((split, document))
        self._num_tokens[split] += document.num_tokens
        # One document is in memory anyway, its copies with it.
        size = sum(self._num_tokens.values()) + _TOKENS_PER_DOCUMENT * len(self._waiting)
        is_too_much = size > MOST_WAITING_TOKENS and document.text_hash != self._waiting[0][1].text_hash
        self.is_settled = is_too_much or self._is_balanced(**self._num_tokens)
        return self._take() if self.is_settled else []

    def finish(self) -> Sequence[tuple[str, _D]]:
        """What still waits, cut if need be."""
        waiting = self._take()
        num_tokens = sum(self._num_tokens.values())
        return (self._cut([document for _, document in waiting], num_tokens) if waiting else None) or waiting

    def _take(self) -> list[tuple[str, _D]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _is_balanced(self, train: int, val: int) -> bool:
        return min(train, val) >= self._window and val <= max(0.5, 2 * self._val_fraction) * (train + val)

    def _cut(self, documents: list[_D], num_tokens: int) -> list[tuple[str, _D]] | None:
        """The end of the text for val; None when it is too short."""
        wanted = max(round(num_tokens * self._val_fraction), self._window)
        # A document that is cut ends twice, each time with an end-of-text token.
        if num_tokens + 1 - wanted < self._window:
            return None
        if all(document.text_hash == documents[0].text_hash for document in documents):
            for_val = -(-wanted // len(documents))
            halves = documents[0].cut_at(documents[0].num_tokens - for_val)
            found = [pair for _ in documents for pair in zip(("train", "val"), halves, strict=True)]
        else:
            found = list(_cut_where(documents, num_tokens - wanted))
        self.note = (
            f"Validation is the last {wanted:,} of the text's {num_tokens:,} tokens: it has too few documents to "
            "choose whole ones by --val-fraction and --seed."
        )
        return found


def _cut_where(documents: list[_D], num_train_tokens: int) -> Iterator[tuple[str, _D]]:
    left = num_train_tokens
    for document in documents:
        before, left = left, left - document.num_tokens
        if left >= 0 or before <= 0:
            yield ("train" if left >= 0 else "val"), document
        else:
            yield from zip(("train", "val"), document.cut_at(before), strict=True)
