"""Marks of tokens in memory, and the rows of shards with a mask.

A token that the loss counts as a target has TARGET set, the first token of a document BEGIN. Ids are below both. Shards
store the ids in a column of their own, and before it a column `mask`: a byte per token, 1 for a target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Tokens with marks.
Marked = NDArray[np.uint32]
TARGET = np.uint32(1 << 30)
BEGIN = np.uint32(1 << 31)
_IDS = np.uint32((1 << 30) - 1)


def ids_of(marked: Marked) -> Marked:
    """Return the ids of marked tokens."""
    return marked & _IDS


def are_targets(marked: Marked) -> NDArray[np.bool_]:
    """Return which marked tokens are targets."""
    return (marked & TARGET) > 0


def mark(ids: NDArray[np.unsignedinteger], mask: NDArray[np.bool_] | None) -> Marked:
    """Return tokens with the marks of those in the mask, or of all."""
    marked = ids.astype(np.uint32)
    return marked | TARGET if mask is None else marked | np.where(mask, TARGET, np.uint32(0))


def to_rows(marked: Marked, dtype: str) -> NDArray[np.uint8]:
    """Return the stored bytes of windows [n, T + 1], [n, bytes]."""
    mask, ids = are_targets(marked).astype(np.uint8), ids_of(marked).astype(dtype)
    return np.concatenate([mask, ids.view(np.uint8)], axis=1)
