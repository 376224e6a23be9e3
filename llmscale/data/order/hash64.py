"""Stateless 64-bit mixing: the only source of randomness of the sample order. NumPy only.

`mix64` is the finalizer of splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants of variant 13 by Stafford). It is written out here because the order of samples must
never depend on a library version: NumPy does not promise that `Generator.permutation` stays the same (NEP
19).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

#: 2^64 divided by the golden ratio, splitmix64's increment: consecutive multiples are far apart in every bit.
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(values: UInt64Array) -> UInt64Array:
    """A bijection of 64-bit words in which every input bit changes every output bit with probability 1/2."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fold64(keys: UInt64Array, values: UInt64Array) -> UInt64Array:
    """New keys, a function of (key, value), element by element; either side may be broadcast."""
    return mix64(keys ^ mix64(values + np.uint64(GOLDEN)))


def key64(*parts: int) -> UInt64Array:
    """One key, shape [1], for a tuple of integers such as (seed, epoch)."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = fold64(key, np.array([part & _MASK], np.uint64))
    return key
