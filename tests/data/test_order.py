from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmscale.data.order import SampleOrder
from llmscale.data.streaming_import import streaming_module
from llmscale.errors import ConfigError

PINNED = [1, 6, 12, 17, 0, 7, 13, 16, 4, 9, 11, 19, 3, 8, 14, 18, 2, 10, 15, 20, 5]
PINNED += [0, 7, 12, 16, 3, 6, 13, 18, 1]
SHARD_SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(SHARD_SIZES, st.integers(-5, 2**40), st.integers(1, 12), st.integers(1, 80), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_epoch_covers_every_sample_once(
    sizes: list[int], seed: int, num_rows: int, block_size: int, shuffle: bool
) -> None:
    order = SampleOrder(sizes, seed=seed, shuffle=shuffle, num_canonical_nodes=num_rows, block_size=block_size)
    n = sum(sizes)
    for epoch in range(3):
        ids = order.sample_ids(np.arange(epoch * n, (epoch + 1) * n))
        assert np.array_equal(np.sort(ids), np.arange(n))


@given(SHARD_SIZES, st.integers(0, 9), st.lists(st.integers(0, 2000), min_size=1, max_size=40))
@settings(max_examples=20, deadline=None)
def test_any_position_is_found_on_its_own(sizes: list[int], seed: int, positions: list[int]) -> None:
    stream = SampleOrder(sizes, seed=seed, num_canonical_nodes=5, block_size=16).sample_ids(np.arange(2001))
    alone = SampleOrder(sizes, seed=seed, num_canonical_nodes=5, block_size=16).sample_ids(np.array(positions))
    assert np.array_equal(alone, stream[positions])


def test_order_is_pinned() -> None:
    """A changed order must come with a changed ALGORITHM, or resumed runs repeat and skip samples silently."""
    order = SampleOrder([7, 5, 9], seed=17, num_canonical_nodes=4, block_size=3)
    assert order.sample_ids(np.arange(30)).tolist() == PINNED
    assert order.identity("abc")["algorithm"] == "feistel-blocks-1"


def test_unshuffled_order_is_the_order_of_the_set() -> None:
    order = SampleOrder([4, 3], seed=1, shuffle=False)
    assert order.sample_ids(np.arange(5, 12)).tolist() == [5, 6, 0, 1, 2, 3, 4]


def test_seed_and_epoch_change_the_order() -> None:
    n = 400
    first, second = (SampleOrder([100] * 4, seed=seed, num_canonical_nodes=4) for seed in (1, 2))
    epochs = first.sample_ids(np.arange(2 * n))
    assert (epochs[:n] == epochs[n:]).mean() < 0.05
    assert (epochs[:n] == second.sample_ids(np.arange(n))).mean() < 0.05


def test_a_row_keeps_its_samples_in_every_epoch() -> None:
    """So that the cache of the node that holds the row stays valid."""
    order = SampleOrder([30, 50, 20, 40], seed=3, num_canonical_nodes=4, block_size=8)
    positions = np.arange(140)
    for epoch in (1, 2):
        for row in range(4):
            first = positions[order.rows(positions) == row]
            assert set(order.sample_ids(first)) == set(order.sample_ids(first + epoch * 140))


def test_shuffles_as_well_as_streaming() -> None:
    """Against Streaming's py1br and py1e with the same rows and block, averaged over seeds."""
    sizes, rows, block = np.full(60, 100), 4, 400
    n = int(sizes.sum())
    partition = streaming_module("partition").get_partitions("relaxed", n, rows, 1, 1, 1, 1, 0, 1).reshape(-1)
    shuffle = streaming_module("shuffle").get_shuffle
    orders = {
        "ours": [
            SampleOrder(sizes, seed=seed, num_canonical_nodes=rows, block_size=block).sample_ids(np.arange(n))
            for seed in range(5)
        ],
        "py1br": [shuffle("py1br", sizes, rows, seed, 0, block)[partition] for seed in range(5)],
        "py1e": [shuffle("py1e", sizes, rows, seed, 0, block)[partition] for seed in range(5)],
    }
    spread = {name: np.mean([_shards_per_batch(ids, 32) for ids in each]) for name, each in orders.items()}
    held = {name: np.mean([_shards_held(ids, rows) for ids in each]) for name, each in orders.items()}
    gap = {name: np.mean([_mean_gap(ids) for ids in each]) for name, each in orders.items()}
    for theirs in ("py1br", "py1e"):
        assert spread["ours"] > 0.95 * spread[theirs], spread
        assert held["ours"] < 1.25 * held[theirs], held
        assert gap["ours"] > 0.8 * gap[theirs], gap
    print(spread, held, gap)


def _shards_per_batch(ids: np.ndarray, batch: int) -> float:
    shards = ids[: len(ids) // batch * batch].reshape(-1, batch) // 100
    return float(np.mean([len(np.unique(row)) for row in shards]))


def _shards_held(ids: np.ndarray, rows: int) -> float:
    """Distinct shards that a node holding one row meets within 100 of its samples."""
    mine = ids[::rows]
    windows = mine[: len(mine) // 100 * 100].reshape(-1, 100) // 100
    return float(np.mean([len(np.unique(window)) for window in windows]))


def _mean_gap(ids: np.ndarray) -> float:
    place = np.argsort(ids)
    neighbours = np.abs(np.diff(place))[np.arange(len(ids) - 1) % 100 != 99]
    return float(neighbours.mean())


def test_first_and_last_samples_are_uniform() -> None:
    """No sample prefers a place: which comes first, over many seeds."""
    zero = np.array([0])
    orders = (SampleOrder([8] * 4, seed=seed, num_canonical_nodes=2, block_size=64) for seed in range(1600))
    counts = np.bincount([int(order.sample_ids(zero)[0]) for order in orders], minlength=32)
    assert ((counts - 50) ** 2 / 50).sum() < 62  # chi-square, 31 degrees of freedom: p < 0.001


@pytest.mark.parametrize(("name", "value"), [("num_canonical_nodes", 0), ("block_size", -1)])
def test_impossible_settings_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {value}"):
        SampleOrder([4], seed=0, **{name: value})


def test_an_empty_set_has_no_order() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        SampleOrder([], seed=0)
