"""Choose a document's split by a hash of its text and the seed, so that copies stay together.

If documents are too few or too short for that, the last ones are validation instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.order.permutation import fold64, key64
from llmscale.data.tokenizers.tokenizer import TokenArray

#: Most tokens in memory (256 MiB) while documents wait for a window of validation.
MOST_WAITING_TOKENS = 1 << 26
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


class Sized(Protocol):
    """A tokenised document."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, end-of-text included."""


_D = TypeVar("_D", bound=Sized)


class SplitAssigner(Generic[_D]):
    """Assigns documents to train or val, so that both hold a window and val is not most of the text.

    Documents wait until their scores achieve that. If they never do, or too many wait, val gets the last `val_fraction`
    of those that wait, at least one window, and the document at the border is cut. A text of less than two windows is
    left alone.
    """

    def __init__(
        self,
        val_fraction: float,
        window: int,
        cut: Callable[[_D, int], tuple[_D, _D]] | None,
        *,
        keeps_order: bool = False,
    ) -> None:
        """`cut` returns the first tokens of a document, as many as it is given, and the rest as two documents; None
        where documents stay complete.

        With `keeps_order` a split's documents stay in the order of the text.
        """
        self._val_fraction = val_fraction
        self._window = window
        self._cut = cut
        self._keeps_order = keeps_order
        self._waiting: list[tuple[float, _D]] = []
        self._num_tokens = {"train": 0, "val": 0}
        self.is_settled = val_fraction == 0
        """True once scores alone decide, and no document waits."""
        self.note = ""
        """Description of the division, if scores did not decide."""

    def is_val(self, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which documents go to val, once settled."""
        return scores < self._val_fraction

    def add(self, score: float, document: _D) -> Sequence[tuple[str, _D]]:
        """Return the documents that need not wait any longer, with their splits."""
        self._waiting.append((score, document))
        self._num_tokens[self._split(score)] += document.num_tokens
        train, val = self._num_tokens["train"], self._num_tokens["val"]
        if min(train, val) >= self._window and val <= max(0.5, 2 * self._val_fraction) * (train + val):
            self.is_settled = True
            return self._by_score()
        return self._divide("the text's first") if train + val > MOST_WAITING_TOKENS else []

    def finish(self) -> Sequence[tuple[str, _D]]:
        """Return the documents that still wait."""
        return [] if self.is_settled else self._divide("the text's")

    def _split(self, score: float) -> str:
        return "val" if score < self._val_fraction else "train"

    def _by_score(self) -> list[tuple[str, _D]]:
        """Return the documents that wait, by score.

        Unless order is kept, a document with the lowest score so far comes last of those before the next such one, so
        that a dataset is the one that version 0.1.0 prepares.
        """
        before: list[tuple[float, _D]] = []
        lowest: list[tuple[float, _D]] = []
        place = 0
        while not self._keeps_order and place < len(self._waiting) and self._waiting[place][0] >= self._val_fraction:
            scored = self._waiting[place]
            if not lowest or scored[0] < lowest[0][0]:
                before, lowest = before + lowest, [scored]
            elif scored[0] == lowest[0][0]:
                lowest.append(scored)
            else:
                before.append(scored)
            place += 1
        ordered = before + lowest + self._waiting[place:]
        return [(self._split(score), document) for score, document in ordered]

    def _divide(self, of_what: str) -> list[tuple[str, _D]]:
        """Assign the last of the documents that wait to val."""
        self.is_settled = True
        num_tokens = sum(self._num_tokens.values())
        num_val = max(round(num_tokens * self._val_fraction), self._window)
        # Both parts of a cut document end with an end-of-text token.
        num_train = left = num_tokens - num_val
        if num_train + 1 < self._window:
            return self._by_score()
        divided: list[tuple[str, _D]] = []
        for _, document in self._waiting:
            if self._cut is not None and 0 < left < document.num_tokens:
                divided += zip(("train", "val"), self._cut(document, left), strict=True)
            else:
                divided.append(("train" if left > 0 else "val", document))
            left -= document.num_tokens
        self.note = (
            f"Validation is the last {num_val:,} of {of_what} {num_tokens:,} tokens: it has too few documents to "
            "choose whole ones by --val-fraction and --seed."
        )
        return divided
