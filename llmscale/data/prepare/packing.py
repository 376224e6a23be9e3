"""Cut a split's documents into windows of T + 1 tokens: the stream of all tokens, or rows that start at a document."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmscale.data.shards.manifest import TokenDtype
from llmscale.data.shards.token_shards import BEGIN, Marked

Tokens = NDArray[np.unsignedinteger]
Windows = NDArray[np.unsignedinteger]

#: Documents that wait for a row in which they fit, as in nanochat, and their tokens, which bound memory.
_MOST_WAITING = 1024
_MOST_WAITING_TOKENS = 1 << 22
#: Rows that the waiting documents fill at least, so that there is a choice at every row.
_LEAST_WAITING_ROWS = 4


@dataclass
class PackingState:
    """Tokens that are in no window yet."""

    tokens: Tokens
    """All waiting tokens, [n]."""
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of each waiting document; negative for the end of a document, whose beginning is in windows."""
    num_cropped: int = 0
    """Tokens that were cut off at the ends of windows."""


class Packing(Protocol):
    """Cuts documents into windows. The windows do not depend on how documents are grouped into calls."""

    num_cropped: int
    """Tokens that were cut off at the ends of windows."""

    def cut(self, tokens: Tokens) -> Windows:
        """Take complete documents, each with end-of-text, and return windows [n, T + 1]."""

    def finish(self) -> Windows:
        """Return the last windows [n, T + 1]. Fewer tokens than a window still wait."""

    def state(self) -> PackingState:
        """Return the waiting tokens, from which a constructor resumes."""

    @property
    def num_tail(self) -> int:
        """Waiting tokens that no window holds."""


class StreamPacking:
    """Window w is tokens [w T, w T + T] of the stream: T + 1 tokens, the last of which is the next window's first.

    With inputs window[:-1] and targets window[1:], every token is an input once and a target once.
    """

    num_cropped = 0

    def __init__(self, seq_len: int, state: PackingState) -> None:
        self._seq_len = seq_len
        self._rest = state.tokens
        self._has_windows = len(state.lengths) > 0

    def cut(self, tokens: Tokens) -> Windows:
        tokens = np.concatenate([self._rest, tokens])
        windows = _consecutive(tokens, self._seq_len)
        self._has_windows |= len(windows) > 0
        # With the token that two windows share.
        self._rest = tokens[len(windows) * self._seq_len :].copy()
        return windows

    def finish(self) -> Windows:
        return self.cut(self._rest[:0])

    def state(self) -> PackingState:
        return PackingState(self._rest, np.full(int(self._has_windows), -len(self._rest)))

    @property
    def num_tail(self) -> int:
        return len(self._rest) - self._has_windows


class BestFitPacking:
    """Rows that start at a document: the longest waiting one, then again and again the longest that fits.

    When none fits, the shortest fills the row and the rest of it is dropped (as in nanochat; best fit is from Ding et
    al. 2024, "Fewer Truncations Improve Language Modeling"). A document longer than a row first fills rows of its
    own, consecutive ones as in a stream; its end is packed like a short document, and starts a row only when nothing
    else can. No token is an input twice or a target twice.
    """

    def __init__(self, seq_len: int, dtype: TokenDtype, eot_token: int, state: PackingState) -> None:
        self._seq_len = seq_len
        self._dtype = np.dtype(dtype)
        self._eot_token = eot_token
        self._whole: list[Tokens] = []
        """Complete documents, by ascending length."""
        self._ends: list[Tokens] = []
        """Ends of documents, by ascending length."""
        self._num_waiting = len(state.tokens)
        self.num_cropped = state.num_cropped
        pieces = np.split(state.tokens, np.cumsum(np.abs(state.lengths))[:-1])
        for piece, length in zip(pieces, state.lengths.tolist(), strict=False):
            (self._whole if length > 0 else self._ends).append(piece)

    def cut(self, tokens: Tokens) -> Windows:
        rows = [np.empty((0, self._seq_len + 1), self._dtype)]
        ends = np.flatnonzero(tokens == self._eot_token) + 1
        for document in np.split(tokens, ends[:-1]):
            rows.append(self._add(document))
            while self._num_waiting >= _LEAST_WAITING_ROWS * (self._seq_len + 1) and (
                len(self._whole) + len(self._ends) > _MOST_WAITING or self._num_waiting > _MOST_WAITING_TOKENS
            ):
                rows.append(self._fill_row())
        return np.concatenate(rows)

    def finish(self) -> Windows:
        rows = [np.empty((0, self._seq_len + 1), self._dtype)]
        while self._num_waiting > self._seq_len:
            rows.append(self._fill_row())
        return np.concatenate(rows)

    def state(self) -> PackingState:
        tokens = np.concatenate([np.zeros(0, self._dtype), *self._whole, *self._ends])
        lengths = [*map(len, self._whole), *(-len(piece) for piece in self._ends)]
        return PackingState(tokens, np.array(lengths, np.int64), self.num_cropped)

    @property
    def num_tail(self) -> int:
        return self._num_waiting

    def _add(self, document: Tokens) -> Windows:
        """Return the rows that a document fills alone, and let the rest of it wait."""
        windows = _consecutive(document, self._seq_len)
        # Not with the token that two windows share: in another row it would be a target again.
        if len(windows):
            rest = document[len(windows) * self._seq_len + 1 :]
        else:
            rest = document
        if len(rest):
            insort(self._ends if len(windows) else self._whole, rest.copy(), key=len)
            self._num_waiting += len(rest)
        return windows

    def _fill_row(self) -> Windows:
        """Return a row [1, T + 1] of waiting documents, which must hold as many tokens."""
        row = np.empty(self._seq_len + 1, self._dtype)
        place = 0
        while place < len(row):
            piece = self._take(len(row) - place, starts_row=place == 0)
            beginning = piece[: len(row) - place]
            row[place : place + len(beginning)] = beginning
            place += len(beginning)
            self._num_waiting -= len(piece)
            self.num_cropped += len(piece) - len(beginning)
        return row[None]

    def _take(self, room: int, *, starts_row: bool) -> Tokens:
        """Remove and return the longest piece of at most `room` tokens, or else the shortest one."""
        kinds = [kind for kind in (self._whole, self._ends) if kind]
        if starts_row:
            kinds = kinds[:1]
        fitting = [(kind, bisect_right(kind, room, key=len) - 1) for kind in kinds]
        kind, place = max(fitting, key=lambda choice: len(choice[0][choice[1]]) if choice[1] >= 0 else 0)
        if place < 0:
            kind = min(kinds, key=lambda kind: len(kind[0]))
            place = 0
        return kind.pop(place)


class ConversationPacking:
    """Rows of complete conversations, whose tokens have marks; the rest of a row is padding without targets.

    The longest that waits begins a row, then comes again and again the longest that fits: none is cut. With `alone`, a
    row has one. No conversation may be longer than a row.
    """

    num_cropped = num_tail = 0

    def __init__(self, seq_len: int, padding: int, state: PackingState, *, alone: bool) -> None:
        self._length = seq_len + 1
        self._padding = padding
        self._alone = alone
        self._waiting: list[Marked] = []
        """Conversations by ascending length."""
        self.cut(state.tokens)

    def cut(self, tokens: Tokens) -> Windows:
        rows = []
        for conversation in np.split(tokens, np.flatnonzero(tokens & BEGIN)[1:]) if len(tokens) else []:
            insort(self._waiting, conversation.copy(), key=len)
            if self._alone or len(self._waiting) > _MOST_WAITING:
                rows.append(self._fill_row())
        return self._stack(rows)

    def finish(self) -> Windows:
        rows = []
        while self._waiting:
            rows.append(self._fill_row())
        return self._stack(rows)

    def state(self) -> PackingState:
        return PackingState(np.concatenate([np.zeros(0, np.uint32), *self._waiting]))

    def _fill_row(self) -> Marked:
        row = np.full(self._length, self._padding, np.uint32)
        place = 0
        while self._waiting and (place == 0 or not self._alone):
            number = bisect_right(self._waiting, self._length - place, key=len) - 1
            if number < 0:
                break
            conversation = self._waiting.pop(number)
            row[place : place + len(conversation)] = conversation
            place += len(conversation)
        return row

    def _stack(self, rows: list[Marked]) -> Windows:
        if rows:
            return np.stack(rows)
        return np.empty((0, self._length), np.uint32)


def _consecutive(tokens: Tokens, seq_len: int) -> Windows:
    """Return the full windows [n, T + 1] of tokens, of which neighbours share one token."""
    if len(tokens) <= seq_len:
        return np.empty((0, seq_len + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]
