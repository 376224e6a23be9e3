"""Statistics of a prepared dataset's tokens: document lengths, copies, wrongly decoded text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.shards.token_shards import WindowReader

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: A window may begin or end within a character, which takes up to four tokens.
_CUT_CHARACTERS = 4
_READ_AT_A_TIME = 256
_BAR_CELLS = 40
_MOST_SHARDS = 8


@dataclass(frozen=True)
class WindowStatistics:
    """Statistics of some windows of a split."""

    num_windows: int
    """Windows read."""
    num_copies: int
    """Windows equal to an earlier one, token by token."""
    num_undecodable: int
    """Windows with U+FFFD in the text, which was invalid or wrongly decoded before."""
    most_copied: tuple[int, int] | None
    """Sample id and number of copies of the most copied window, or None."""


def choose_windows(samples_per_shard: NDArray[np.int64], num_windows: int) -> NDArray[np.int64]:
    """Return about `num_windows` ids, spread evenly over few shards, which are spread evenly over the split. Few
    shards, because a shard is fetched and checked in full for its first window."""
    begins = np.cumsum(samples_per_shard) - samples_per_shard
    shards = np.unique(np.linspace(0, len(begins) - 1, min(_MOST_SHARDS, len(begins))).astype(np.int64))
    of_each = -(-num_windows // len(shards))
    spread = [
        begins[shard] + np.unique(np.linspace(0, size - 1, min(of_each, size)).astype(np.int64))
        for shard, size in zip(shards.tolist(), samples_per_shard[shards].tolist(), strict=True)
        if size
    ]
    return np.concatenate(spread)


def read_statistics(
    shards: WindowReader, ids: NDArray[np.int64], decode: Callable[[list[int]], str]
) -> WindowStatistics:
    """Return statistics over the windows `ids`. Raises DataError."""
    # By hash, because millions of windows would not fit into memory.
    first_of: dict[bytes, int] = {}
    copies: dict[int, int] = {}
    undecodable = 0
    for begin in range(0, len(ids), _READ_AT_A_TIME):
        some = ids[begin : begin + _READ_AT_A_TIME]
        for sample_id, window in zip(some.tolist(), shards.read(some), strict=True):
            first = first_of.setdefault(xxhash.xxh3_128_digest(window.data), sample_id)
            if first != sample_id:
                copies[first] = copies.get(first, 0) + 1
            undecodable += _REPLACEMENT in decode(window.tolist())[_CUT_CHARACTERS:-_CUT_CHARACTERS]
    if copies:
        most = max(copies.items(), key=lambda item: item[1])
    else:
        most = None
    return WindowStatistics(len(ids), sum(copies.values()), undecodable, most)


def document_lengths(shards: WindowReader, num_windows: int, eot_token: int) -> NDArray[np.int64]:
    """Return the tokens, end-of-text included, of each document within the first windows of an unshuffled split. Raises
    DataError."""
    windows = shards.read(np.arange(min(num_windows, len(shards))))
    # Neighbours share a token: the last of one is the first of the next.
    ends = np.flatnonzero(windows[:, :-1].ravel() == eot_token)
    return np.diff(ends)


def draw_lengths(lengths: NDArray[np.int64]) -> list[str]:
    """Return lines with a bar for each power of two of lengths, and the quartiles; none without documents."""
    if not len(lengths):
        return []
    classes = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(classes)
    width = len(f"{2 ** len(counts):,}")
    lines = [
        f"{2**number:>{width},} to {2 ** (number + 1) - 1:>{width},}  "
        f"{'#' * -(-int(counts[number]) * _BAR_CELLS // int(counts.max())):{_BAR_CELLS}} {counts[number]:,}"
        for number in range(int(classes.min()), len(counts))
    ]
    low, middle, high = np.percentile(lengths, (25, 50, 75))
    return [*lines, f"quartiles {low:,.0f}, {middle:,.0f} and {high:,.0f} tokens, longest {lengths.max():,}"]
