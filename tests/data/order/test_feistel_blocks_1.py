"""The order of runs that began before today's: not one id may ever change."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from llmscale.data.order.feistel_blocks_1 import FeistelBlocksOrder


@pytest.mark.parametrize(
    ("sizes", "settings", "digest", "first"),
    [
        ([7, 5, 9], (17, 4, 3), "30d76344d465d4b8", [1, 6, 12, 17, 0, 7]),
        ([100], (1, 48, 32768), "94efb0c2beeb5d02", [1, 5, 8, 10, 13, 15]),
        ([1000] * 60, (-3, 48, 32768), "5a037c053c044b63", [29038, 44096, 51862, 20048, 29181, 44120]),
        ([33000] * 200, (2**40, 48, 32768), "5f01b1ec133b5b91", [4345927, 2060772, 4720225, 400119, 3316897, 1741465]),
        ([1, 50000, 3, 70001], (5, 6, 1000), "c2d2a75d42a32513", [50673, 50427, 50318, 50669, 50256, 50066]),
    ],
)
def test_ids_and_rows_are_those_of_old(
    sizes: list[int], settings: tuple[int, int, int], digest: str, first: list[int]
) -> None:
    """Over three epochs, compared with what the module gave when it was the only order."""
    seed, num_rows, block_size = settings
    order = FeistelBlocksOrder(sizes, seed=seed, num_canonical_nodes=num_rows, block_size=block_size)
    positions = np.unique(np.linspace(0, 3 * sum(sizes) - 1, 5000).astype(np.int64))
    ids = order.sample_ids(positions)
    assert ids[:6].tolist() == first
    contents = ids.astype("<i8").tobytes() + order.rows(positions).astype("<i8").tobytes()
    assert hashlib.sha256(contents).hexdigest()[:16] == digest


def test_it_has_its_own_name() -> None:
    order = FeistelBlocksOrder([9], seed=1, num_canonical_nodes=4, block_size=3)
    assert order.identity("abc") == {
        "algorithm": "feistel-blocks-1",
        "set_fingerprint": "abc",
        "num_samples": 9,
        "seed": 1,
        "shuffle": True,
        "num_canonical_nodes": 4,
        "block_size": 3,
    }
