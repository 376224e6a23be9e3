"""Fewer points that draw the same picture. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def thin(values: Sequence[float], most: int) -> NDArray[np.int64]:
    """Ascending indices of at most about `most` of the values: in each of equal stretches the lowest, the highest and
    one that is NaN, so that no spike and no gap is lost; the first and the last of all. All of them when that is few
    enough."""
    column = np.asarray(values, dtype=np.float64)
    if len(column) <= most:
        return np.arange(len(column))
    width = -(-len(column) // max(1, most // 2))
    rows = -(-len(column) // width)
    padded = np.full(rows * width, np.nan)
    padded[: len(column)] = column
    stretches = padded.reshape(rows, width)
    gaps = np.isnan(stretches)
    starts = np.arange(rows) * width
    # Where a stretch holds no number at all, argmin and argmax are its first value.
    lowest, highest = np.where(gaps, np.inf, stretches).argmin(1), np.where(gaps, -np.inf, stretches).argmax(1)
    chosen = [starts + lowest, starts + highest]
    with_gap = gaps.any(1)
    chosen.append((starts + gaps.argmax(1))[with_gap])
    indices = np.unique(np.concatenate([*chosen, [0, len(column) - 1]]))
    return indices[indices < len(column)].astype(np.int64)


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Ascending indices of at most `most` of `count` values, evenly, with the first and the last; for what has no
    spikes."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
