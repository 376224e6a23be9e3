"""In which order the rows of a round are visited: random, yet fair to every number of nodes. NumPy only.

A round visits each of R rows once. Going round them in one fixed order would show as a period in batches smaller than
a round; a free shuffle would leave a batch of G < R samples with more rows of one node than of another. Here the rows
are scrambled digit by digit: for every divisor N of R, the row modulo N is a permutation of the turn modulo N, so N
turns on end, counted from a multiple of N, meet each of N nodes once. For R a power of a prime these are Owen's nested
scrambles (A. Owen, "Randomly permuted (t,m,s)-nets and (t,s)-sequences", 1995), lowest digit first: each digit is
permuted in a way that the digits below it decide. Several primes are joined by the Chinese remainder theorem.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.hash64 import UInt64Array, fold64

IntArray = NDArray[np.int64]


def scramble(turns: IntArray, num_rows: int, keys: UInt64Array) -> IntArray:
    """The row visited at each turn, int64 [n], for `turns` [n] in 0..num_rows - 1 of rounds with `keys` [n]."""
    rows = np.zeros_like(turns)
    for prime, exponent in prime_powers(num_rows):
        modulus = prime**exponent
        others = num_rows // modulus
        # 1 modulo `modulus`, 0 modulo the other prime powers.
        unit = others * pow(others, -1, modulus) % num_rows
        residues = _scramble_digits(turns, prime, exponent, fold64(keys, np.array([prime], np.uint64)))
        rows = (rows + residues * unit) % num_rows
    return rows


def _scramble_digits(turns: IntArray, prime: int, exponent: int, keys: UInt64Array) -> IntArray:
    """A nested permutation of turns modulo prime^exponent."""
    images = np.zeros_like(turns)
    weight = 1
    for _ in range(exponent):
        # weight + lower digits: another number for every place in the tree of digits.
        draws = fold64(keys, (weight + turns % weight).astype(np.uint64))
        # digit -> a digit + b modulo a prime permutes the digits for every a but 0.
        factors = (draws % np.uint64(prime - 1)).astype(np.int64) + 1
        shifts = ((draws >> np.uint64(32)) % np.uint64(prime)).astype(np.int64)
        images += (turns // weight % prime * factors + shifts) % prime * weight
        weight *= prime
    return images


def prime_powers(number: int) -> Iterator[tuple[int, int]]:
    """(prime, exponent) of each prime factor, ascending."""
    prime = 2
    while prime * prime <= number:
        exponent = 0
        while number % prime == 0:
            number //= prime
            exponent += 1
        if exponent:
            yield prime, exponent
        prime += 1
    if number > 1:
        yield number, 1
