"""Random permutations that can be evaluated at single points, without tables or state. NumPy only.

An alternating unbalanced Feistel network permutes the 2^b numbers of b bits, where b is the smallest that
holds the domain; results outside the domain are permuted again until they fall inside (cycle walking; Black &
Rogaway, "Ciphers with arbitrary finite domains", 2002), which permutes [0, size) exactly. 2^b < 2 x size, so
a point takes less than two walks on average. A table of 10^8 int64 would be 0.8 GB per process; this needs
nothing and can start anywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

#: 2^64 divided by the golden ratio, splitmix64's increment: consecutive multiples are far apart in every bit.
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
#: Half-rounds of the network. Four give a pseudo-random permutation when the round functions are ideal (Luby
#: & Rackoff 1988); more are needed for the small domains here: tests/data/order/test_permutation.py measures it.
HALF_ROUNDS = 12
#: Halves of one or two bits mix too little, so small domains walk within 2^6 numbers.
SMALLEST_BITS = 6


def mix64(values: UInt64Array) -> UInt64Array:
    """Permute 64-bit words so that every input bit changes every output bit with probability 1/2.

    This is the finalizer of splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014; constants of variant 13 by Stafford), the only source of randomness of the sample order. It is written out
    here because that order must never depend on a library version: NumPy does not promise that `Generator.permutation`
    stays the same (NEP 19).
    """
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fold64(keys: UInt64Array, values: UInt64Array) -> UInt64Array:
    """Return new keys, an element-wise function of (key, value) with broadcasting."""
    return mix64(keys ^ mix64(values + np.uint64(GOLDEN)))


def key64(*parts: int) -> UInt64Array:
    """Return one key, shape [1], for integers such as (seed, epoch)."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = fold64(key, np.array([part & _MASK], np.uint64))
    return key


def ids_checksum(sample_ids: NDArray[np.int64]) -> int:
    """Return an order-independent checksum, an int64 that adds up over ranks (modulo 2^64) to the batch's.

    A sum of mixed ids: a wrong, missing or repeated id goes unnoticed with probability 2^-64.
    """
    total = mix64(np.asarray(sample_ids).astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64)
    return int(total.astype(np.int64))


def permute(index: NDArray[np.int64], size: NDArray[np.int64], key: UInt64Array) -> NDArray[np.int64]:
    """Return the image of `index[i]` under the permutation of [0, size[i]) that `key[i]` selects, for every i.

    All three have shape [n]; 0 <= index < size. Returns int64 [n].
    """
    bits = np.maximum(np.frexp((size - 1).astype(np.float64))[1], SMALLEST_BITS).astype(np.uint64)
    low_bits = bits >> np.uint64(1)
    images = index.astype(np.uint64)
    limit = size.astype(np.uint64)
    walking = np.flatnonzero(size > 1)
    while walking.size:
        images[walking] = _feistel(images[walking], bits[walking], low_bits[walking], key[walking])
        walking = walking[images[walking] >= limit[walking]]
    return images.astype(np.int64)


def _feistel(values: UInt64Array, bits: UInt64Array, low_bits: UInt64Array, key: UInt64Array) -> UInt64Array:
    one = np.uint64(1)
    low_mask = (one << low_bits) - one
    high_mask = (one << (bits - low_bits)) - one
    high = values >> low_bits
    low = values & low_mask
    for half_round in range(0, HALF_ROUNDS, 2):
        low ^= mix64(high ^ (key + _round_constant(half_round))) & low_mask
        high ^= mix64(low ^ (key + _round_constant(half_round + 1))) & high_mask
    return (high << low_bits) | low


def _round_constant(half_round: int) -> np.uint64:
    return np.uint64(GOLDEN * (half_round + 1) % (1 << 64))
