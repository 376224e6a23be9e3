"""Choose a document's split by its text and the seed, so that copies stay together.

If documents are too few or too short for validation, the end of the text is split off instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.order.permutation import fold64, key64
from llmscale.data.tokenizers.tokenizer import TokenArray

_T = TypeVar("_T")
#: Most tokens in memory (256 MiB) while documents wait for a window of validation.
MOST_WAITING_TOKENS = 1 << 26
#: Tokens that a document counts for besides its own, as Python takes 330 bytes for each: at most 2 million wait.
_TOKENS_PER_DOCUMENT = 1 << 5
#: Separates hashes of tokens from those of texts.
_TOKENS_SEED = 0x70C5
#: Separates the scores from the sample order's keys at equal seeds.
_DOMAIN = 0x5B11_7C0D_E5A1_D09E


def hash_text(text: str) -> bytes:
    """Return a 128-bit hash of a document's text."""
    return xxhash.xxh3_128_digest(text.encode())


def hash_tokens(tokens: TokenArray) -> bytes:
    """Return a 128-bit hash of a document given as tokens."""
    return xxhash.xxh3_128_digest(tokens.astype("<u4").data, seed=_TOKENS_SEED)


def split_scores(text_hashes: Sequence[bytes], seed: int) -> NDArray[np.float64]:
    """Return each document's score, uniform in [0, 1); below val_fraction means val."""
    first_words = np.frombuffer(b"".join(text_hashes), "<u8")[::2]
    # 53 bits, the precision of a float, so that a score is never 1.
    return (fold64(key64(seed, _DOMAIN), first_words) >> np.uint64(11)) / 2.0**53


@dataclass(frozen=True)
class HeldBackDocument(Generic[_T]):
    """A document that goes to val if no other does, with its copies."""

    document: _T | None
    num_copies: int
    score: float
    has_others: bool
    """True if other documents exist."""


class SplitAssigner(Generic[_T]):
    """Assigns documents to train or val by score; among two or more different documents, at least one goes to val.

    Until a document scores below `val_fraction`, the one with the lowest score is held back, with the number of its
    copies. It goes to val if no other does. With `keeps_order` all documents after it wait, too.
    """

    def __init__(self, val_fraction: float, *, keeps_order: bool = False) -> None:
        self._val_fraction = val_fraction
        self._keeps_order = keeps_order
        self._has_val = val_fraction == 0
        self._waiting: list[tuple[_T, bool]] = []
        """Documents from the first one with the lowest score on, and whether they have this score."""
        self._held_score = 1.0
        self._has_others = False

    @property
    def is_settled(self) -> bool:
        """True once scores alone decide."""
        return self._has_val

    def held(self) -> HeldBackDocument[_T]:
        """Return the held-back document, for `resume`; without `keeps_order`."""
        document = self._waiting[0][0] if self._waiting else None
        return HeldBackDocument(document, len(self._waiting), self._held_score, self._has_others)

    def resume(self, held: HeldBackDocument[_T] | None) -> None:
        """Restore the state of an assigner that held this back; None for a settled one."""
        if held is None:
            self._has_val = True
        else:
            self._waiting = [(held.document, True)] * held.num_copies if held.document is not None else []
            self._held_score, self._has_others = held.score, held.has_others

    def is_val(self, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which documents go to val, once settled."""
        return scores < self._val_fraction

    def assign(self, score: float, document: _T) -> Iterator[tuple[str, _T]]:
        """Yield the documents whose split is now known."""
        if self._has_val or score < self._val_fraction:
            yield from self._release("train")
            self._has_val = True
            yield ("val" if score < self._val_fraction else "train"), document
        elif score < self._held_score:
            yield from self._release("train")
            self._waiting, self._held_score = [(document, True)], score
        elif score == self._held_score:
            self._waiting.append(self._waiting[0])
        else:
            self._has_others = True
            if self._keeps_order:
                self._waiting.append((document, False))
            else:
                yield "train", document

    def waiting_in_order(self) -> Iterator[_T]:
        """Yield the documents that wait for another one's split, for the sake of the order alone."""
        return (document for document, is_held in self._waiting if not is_held)

    def finish(self) -> Iterator[tuple[str, _T]]:
        """Yield the waiting documents, and let scores alone decide; a corpus of one document is all train."""
        yield from self._release("val" if self._has_others else "train")
        self._has_val = True

    def _release(self, split: str) -> Iterator[tuple[str, _T]]:
        """Yield the waiting documents, those with the lowest score for `split` and all others for train."""
        self._has_others |= bool(self._waiting)
        for document, is_held in self._waiting:
            yield (split if is_held else "train"), document
        self._waiting = []


class Text(Protocol):
    """A tokenised document."""

    @property
    def text_hash(self) -> bytes:
        """Hash, equal for copies."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, end-of-text included."""


_D = TypeVar("_D", bound=Text)


class ValidationKeeper(Generic[_D]):
    """Ensures that both splits hold a window and val is not most of the text, if there is enough text.

    Documents wait until that holds. If it never does, val gets the last `val_fraction` of the text, at least one
    window, and the document at the border is cut. If all documents are copies of one, each is cut at the same place. A
    text of less than two windows is left alone.
    """

    def __init__(self, val_fraction: float, window: int, cut: Callable[[_D, int], tuple[_D, _D]]) -> None:
        """`cut` returns the first tokens of a document, as many as it is given, and the rest as two documents."""
        self._val_fraction = val_fraction
        self._window = window
        self._cut_at = cut
        self._waiting: list[tuple[str, _D]] = []
        self._num_tokens = {"train": 0, "val": 0}
        self.is_settled = val_fraction == 0
        """True once documents pass without waiting."""
        self.note = ""
        """Description of the cut, if one was made."""

    def add(self, split: str, document: _D) -> Sequence[tuple[str, _D]]:
        """Return the documents that need not wait any longer, in order."""
        if self.is_settled:
            return [(split, document)]
        self._waiting.append((split, document))
        self._num_tokens[split] += document.num_tokens
        # One document and its copies are in memory anyway.
        size = sum(self._num_tokens.values()) + _TOKENS_PER_DOCUMENT * len(self._waiting)
        is_too_much = size > MOST_WAITING_TOKENS and document.text_hash != self._waiting[0][1].text_hash
        self.is_settled = is_too_much or self._is_balanced(**self._num_tokens)
        return self._take() if self.is_settled else []

    def finish(self) -> Sequence[tuple[str, _D]]:
        """Return the waiting documents, cut if needed."""
        waiting = self._take()
        num_tokens = sum(self._num_tokens.values())
        return (self._cut([document for _, document in waiting], num_tokens) if waiting else None) or waiting

    def _take(self) -> list[tuple[str, _D]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _is_balanced(self, train: int, val: int) -> bool:
        return min(train, val) >= self._window and val <= max(0.5, 2 * self._val_fraction) * (train + val)

    def _cut(self, documents: list[_D], num_tokens: int) -> list[tuple[str, _D]] | None:
        """Assign the end of the text to val; return None when the text is too short."""
        wanted = max(round(num_tokens * self._val_fraction), self._window)
        # Both parts of a cut document end with an end-of-text token.
        if num_tokens + 1 - wanted < self._window:
            return None
        if all(document.text_hash == documents[0].text_hash for document in documents):
            for_val = -(-wanted // len(documents))
            halves = self._cut_at(documents[0], documents[0].num_tokens - for_val)
            found = [pair for _ in documents for pair in zip(("train", "val"), halves, strict=True)]
        else:
            found = list(self._cut_where(documents, num_tokens - wanted))
        self.note = (
            f"Validation is the last {wanted:,} of the text's {num_tokens:,} tokens: it has too few documents to "
            "choose whole ones by --val-fraction and --seed."
        )
        return found

    def _cut_where(self, documents: list[_D], num_train_tokens: int) -> Iterator[tuple[str, _D]]:
        left = num_train_tokens
        for document in documents:
            before, left = left, left - document.num_tokens
            if left >= 0 or before <= 0:
                yield ("train" if left >= 0 else "val"), document
            else:
                yield from zip(("train", "val"), self._cut_at(document, before), strict=True)
