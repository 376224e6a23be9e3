from __future__ import annotations

import hashlib
import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmscale.data.order.permutation import key64
from llmscale.data.order.sample_order import (
    RankLayout,
    SampleOrder,
    SkippingOrder,
    join_ranges,
    rows_that_do_not_show,
    scramble,
    shard_batch,
    stream_positions,
)
from llmscale.data.prepare.sources.tokens import streaming_module
from llmscale.data.prepare.split_writer import window_keys
from llmscale.errors import ConfigError

PINNED = [18, 14, 9, 2, 8, 0, 16, 15, 17, 12, 7, 5, 13, 6, 4, 20, 19, 3, 10, 11, 1]
PINNED += [5, 6, 12, 16, 15, 8, 3, 20, 11]
SHARD_SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)
MAYBE = st.none() | st.integers(1, 80)


@given(SHARD_SIZES, st.integers(-5, 2**40), MAYBE, MAYBE, st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_epoch_covers_every_sample_once(
    sizes: list[int], seed: int, num_rows: int | None, block_size: int | None, shuffle: bool
) -> None:
    order = SampleOrder(sizes, seed=seed, shuffle=shuffle, num_canonical_nodes=num_rows, block_size=block_size)
    n = sum(sizes)
    for epoch in range(3):
        ids = order.sample_ids(np.arange(epoch * n, (epoch + 1) * n))
        assert np.array_equal(np.sort(ids), np.arange(n))


@given(SHARD_SIZES, st.integers(0, 9), st.lists(st.integers(0, 400), min_size=1, max_size=40))
@settings(max_examples=10, deadline=None)
def test_any_position_is_found_on_its_own(sizes: list[int], seed: int, positions: list[int]) -> None:
    stream = SampleOrder(sizes, seed=seed, num_canonical_nodes=5, block_size=16).sample_ids(np.arange(401))
    alone = SampleOrder(sizes, seed=seed, num_canonical_nodes=5, block_size=16).sample_ids(np.array(positions))
    assert np.array_equal(alone, stream[positions])


def test_order_is_pinned() -> None:
    """A changed order must come with a changed ALGORITHM and keep the old one for the runs that began with it."""
    order = SampleOrder([7, 5, 9], seed=17, num_canonical_nodes=4, block_size=3)
    assert order.sample_ids(np.arange(30)).tolist() == PINNED
    assert order.identity("abc")["algorithm"] == "feistel-rounds-2"


@pytest.mark.parametrize(
    ("sizes", "seed", "settings", "digest"),
    [
        ([100], 1, {}, "53985d8d00da0a71"),
        ([1000] * 400, -3, {}, "c40ec40ac9b6a0fd"),
        ([33000] * 500, 2**40, {"block_size": 1 << 15}, "e9a148bb33964394"),
        ([1, 50000, 3, 70001], 5, {"num_canonical_nodes": 6, "block_size": 1000}, "95d251e579cb81bc"),
    ],
)
def test_large_orders_are_pinned(sizes: list[int], seed: int, settings: dict[str, int], digest: str) -> None:
    order = SampleOrder(sizes, seed=seed, **settings)
    positions = np.unique(np.linspace(0, 3 * sum(sizes) - 1, 5000).astype(np.int64))
    contents = order.sample_ids(positions).astype("<i8").tobytes() + order.rows(positions).astype("<i8").tobytes()
    assert hashlib.sha256(contents).hexdigest()[:16] == digest


def test_unshuffled_order_is_the_order_of_the_set() -> None:
    order = SampleOrder([4, 3], seed=1, shuffle=False)
    assert order.sample_ids(np.arange(5, 12)).tolist() == [5, 6, 0, 1, 2, 3, 4]


def test_a_row_keeps_its_samples_in_every_epoch() -> None:
    """So that the cache of the node that holds the row stays valid."""
    order = SampleOrder([30, 50, 20, 40], seed=3, num_canonical_nodes=4, block_size=8)
    epochs = np.arange(5 * 140).reshape(5, 140)
    rows_of_samples = [order.rows(epoch)[np.argsort(order.sample_ids(epoch))] for epoch in epochs]
    assert all(np.array_equal(rows, rows_of_samples[0]) for rows in rows_of_samples)
    assert np.bincount(rows_of_samples[0]).tolist() == [35] * 4


def _uneven(num_shards: int, seed: int) -> list[int]:
    """Sizes that differ by a factor of ten and more, 120,000 samples or so."""
    sizes = np.random.default_rng(seed).lognormal(0, 0.8, num_shards)
    return np.maximum(sizes / sizes.sum() * 120_000, 1).astype(int).tolist()


LAYOUTS = {
    "one shard": [120_000],
    "three uneven": [7_000, 90_000, 23_000],
    "as many as rows": [2_500] * 48,
    "uneven": _uneven(200, 1),
    "just enough for rows": [312] * 384,
    "many": [120] * 1000,
    "10,000 uneven": _uneven(10_000, 2),
    "one giant among many": [100_000, *[20] * 1000],
}
#: One of each kind: without rows, with them, and with a shard that is nearly all.
FEW_LAYOUTS = ("one shard", "uneven", "one giant among many")
BATCHES = (1, 2, 3, 8, 12, 24, 48, 64, 128, 512, 2048)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW_LAYOUTS else pytest.mark.slow) for name in LAYOUTS]
)
def test_batches_spread_like_a_uniform_shuffles(name: str) -> None:
    """The text being sorted, a sample's position is its id. Of the means of batches: standard deviation within a tenth
    of a uniform shuffle's, and nothing left of one batch in the next eight."""
    sizes, epochs = LAYOUTS[name], 8
    n = sum(sizes)
    ids = SampleOrder(sizes, seed=11).sample_ids(np.arange(epochs * n))
    for batch in BATCHES:
        _check_spread(ids, n, batch)


def _check_spread(places: np.ndarray, n: int, batch: int) -> None:
    """`places` [m] in the sorted text of n samples, in the order in which they are seen."""
    num_batches = len(places) // batch
    means = places[: num_batches * batch].reshape(num_batches, batch).mean(axis=1) - (n - 1) / 2
    uniform = np.sqrt((n * n - 1) / 12 / batch * (n - batch) / (n - 1))
    assert 0.9 < np.sqrt((means**2).mean()) / uniform < 1.1, f"batches of {batch}"
    for lag in range(1, 9):
        correlation = (means[:-lag] * means[lag:]).mean() / (means**2).mean()
        # A uniform shuffle's is -batch / (n - batch) within an epoch.
        assert abs(correlation + batch / (n - batch)) < 4.5 / np.sqrt(num_batches), f"batches of {batch}, lag {lag}"


def test_blocks_of_shuffled_windows_spread_like_a_uniform_shuffle() -> None:
    """A set too large for a node, as `prepare` writes it: what a sample is was decided by window_keys."""
    n = 400_000
    text_places = np.argsort(window_keys(0, n, 3))
    order = SampleOrder([500] * 800, seed=4, num_canonical_nodes=48, block_size=1_000)
    places = text_places[order.sample_ids(np.arange(3 * n))]
    for batch in (1, 8, 12, 24, 48, 128, 512):
        _check_spread(places, n, batch)


@pytest.mark.parametrize("sizes", [[3000], [60] * 400])
def test_epochs_and_seeds_are_independent(sizes: list[int]) -> None:
    """Where a sample is in one epoch says nothing about its place in another, nor under another seed."""
    n, epochs = sum(sizes), 6
    ids = [SampleOrder(sizes, seed=seed).sample_ids(np.arange(epochs * n)).reshape(epochs, n) for seed in (0, 1, 2)]
    places = np.concatenate([np.argsort(each, axis=1) for each in ids])
    correlations = np.corrcoef(places)[np.triu_indices(len(places), 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(n)
    same = [(places[a] == places[b]).sum() for a, b in zip(*np.triu_indices(len(places), 1), strict=True)]
    assert 0.6 < np.mean(same) < 1.4, "two permutations agree in one place, on average"


@pytest.mark.parametrize("num_rows", [1, 4])
def test_no_block_is_short(num_rows: int) -> None:
    """The first samples of an epoch are no neighbours, wherever a row is entered: 12 of 500 spread over hundreds."""
    order = SampleOrder([2_000] * num_rows, seed=6, num_canonical_nodes=num_rows, block_size=600)
    n = order.num_samples
    for epoch in range(100):
        places = np.arange(epoch * n, epoch * n + 64 * num_rows)
        ids = order.sample_ids(places)
        for row in range(num_rows):
            mine = np.sort(ids[order.rows(places) == row])[:12]
            assert len(mine) == 12
        for position in (epoch * n, (epoch + 1) * n - 12 * num_rows):
            few = order.sample_ids(np.arange(position, position + 12 * num_rows)) % 2_000
            assert few.max() - few.min() > 200


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [([9], 1), ([100] * 383, 1), ([100] * 384, 48), ([1] * 384, 48), ([*[100] * 999, 2_000_000], 1), ([7] * 5000, 48)],
)
def test_a_set_has_rows_where_they_do_not_show(sizes: list[int], rows: int) -> None:
    assert rows_that_do_not_show(np.array(sizes)) == SampleOrder(sizes, seed=0).num_canonical_nodes == rows


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [([50] * 400, 2), ([50] * 400, 48), (_uneven(3000, 3), 3), (_uneven(3000, 3), 16)],
    ids=["even 2", "even 48", "uneven 3", "uneven 16"],
)
def test_aligned_batches_need_each_node_equally_in_every_epoch(sizes: list[int], nodes: int) -> None:
    order = SampleOrder(sizes, seed=8, num_canonical_nodes=48)
    n = order.num_samples
    for epoch in range(3):
        first = -(-epoch * n // nodes) * nodes
        count = ((epoch + 1) * n - first) // nodes
        rows = order.rows(np.arange(first, first + count * nodes)).reshape(count, nodes)
        assert (np.sort(rows % nodes, axis=1) == np.arange(nodes)).all()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="needs mosaicml-streaming")
def test_mixes_shards_as_well_as_streaming() -> None:
    """With the same rows and block as Streaming's py1br and py1e, averaged over seeds: as many shards in a batch, as
    few held at a time, neighbours as far apart."""
    sizes, rows, block = np.full(60, 100), 4, 400
    n = int(sizes.sum())
    partition = streaming_module("partition").get_partitions("relaxed", n, rows, 1, 1, 1, 1, 0, 1).reshape(-1)
    shuffle = streaming_module("shuffle").get_shuffle
    ours = [SampleOrder(sizes, seed=seed, num_canonical_nodes=rows, block_size=block) for seed in range(5)]
    positions = np.arange(n)
    spread = np.mean([_shards_per_batch(order.sample_ids(positions), 32) for order in ours])
    held = np.mean([_shards_held(order.sample_ids(positions)[order.rows(positions) == 0]) for order in ours])
    gap = np.mean([_mean_gap(order.sample_ids(positions)) for order in ours])
    for name in ("py1br", "py1e"):
        theirs = [shuffle(name, sizes, rows, seed, 0, block)[partition] for seed in range(5)]
        assert spread > 0.95 * np.mean([_shards_per_batch(ids, 32) for ids in theirs])
        assert held < 1.25 * np.mean([_shards_held(ids[::rows]) for ids in theirs])
        assert gap > 0.8 * np.mean([_mean_gap(ids) for ids in theirs])


def _shards_per_batch(ids: np.ndarray, batch: int) -> float:
    shards = ids[: len(ids) // batch * batch].reshape(-1, batch) // 100
    return float(np.mean([len(np.unique(row)) for row in shards]))


def _shards_held(ids_of_a_row: np.ndarray) -> float:
    """Distinct shards that a node holding one row meets within 100 of its samples."""
    windows = ids_of_a_row[: len(ids_of_a_row) // 100 * 100].reshape(-1, 100) // 100
    return float(np.mean([len(np.unique(window)) for window in windows]))


def _mean_gap(ids: np.ndarray) -> float:
    place = np.argsort(ids)
    neighbours = np.abs(np.diff(place))[np.arange(len(ids) - 1) % 100 != 99]
    return float(neighbours.mean())


@pytest.mark.parametrize(("name", "value"), [("num_canonical_nodes", 0), ("block_size", -1)])
def test_impossible_settings_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {value}"):
        SampleOrder([4], seed=0, **{name: value})


def test_an_empty_set_has_no_order() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        SampleOrder([], seed=0)


def test_what_is_left_out_is_as_if_it_had_never_been_there() -> None:
    order = SampleOrder([500], seed=1)
    skipped = ((0, 3), (10, 20), (990, 1010))
    all_ids = order.sample_ids(np.arange(1500))
    remaining = np.delete(all_ids, np.concatenate([np.arange(begin, end) for begin, end in skipped]))
    assert SkippingOrder(order, skipped).sample_ids(np.arange(len(remaining))).tolist() == remaining.tolist()


def test_without_ranges_nothing_moves() -> None:
    assert stream_positions(np.arange(5), ()).tolist() == [0, 1, 2, 3, 4]


def test_ranges_that_touch_are_one() -> None:
    assert join_ranges([(8, 9), (0, 4), (2, 5), (5, 6)]) == ((0, 6), (8, 9))


NODES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(NODES, st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**9), st.integers(1, 50))
def test_any_number_of_ranks_gets_whole_micro_batches(
    nodes: list[int], unit: int, count: int, start: int, num_rows: int
) -> None:
    positions = np.arange(start, start + count * unit)
    layouts = [RankLayout(rank, tuple(nodes)) for rank in range(sum(nodes))]
    shares = [shard_batch(positions, positions % num_rows, layout, unit) for layout in layouts]
    sizes = [len(share) for share in shares]
    assert all(size % unit == 0 for size in sizes) and max(sizes) - min(sizes) <= unit
    assert np.array_equal(np.sort(np.concatenate(shares)), positions)


def test_a_batch_of_broken_micro_batches_is_refused() -> None:
    positions = np.arange(8)
    with pytest.raises(ConfigError, match="8 samples is not a number of micro-batches of 3"):
        shard_batch(positions, positions, RankLayout(0, (3,)), unit=3)


@pytest.mark.parametrize(
    ("rank", "nodes", "text"), [(2, (2,), "rank must be in 0..1"), (0, (2, 0), "at least one rank")]
)
def test_impossible_layouts_are_refused(rank: int, nodes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RankLayout(rank, nodes)


def _rounds(num_rows: int, num_rounds: int) -> np.ndarray:
    """Rows visited, [num_rounds, num_rows]."""
    keys = np.repeat(np.concatenate([key64(5, number) for number in range(num_rounds)]), num_rows)
    turns = np.tile(np.arange(num_rows, dtype=np.int64), num_rounds)
    return scramble(turns, num_rows, keys).reshape(num_rounds, num_rows)


@given(st.integers(1, 400))
def test_every_aligned_run_of_turns_is_fair_to_the_nodes(num_rows: int) -> None:
    """For every number of nodes that divides the rows; for all of them it means that a round visits each row once."""
    rounds = _rounds(num_rows, 3)
    for nodes in range(1, num_rows + 1):
        if num_rows % nodes == 0:
            visits = np.sort(rounds.reshape(-1, nodes) % nodes, axis=1)
            assert (visits == np.arange(nodes)).all()
