"""Which order a run gets, from what its set is and where it lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.build import WHOLE_SET_BYTES, FeedSettings, build_order
from llmscale.data.order.feistel_blocks_1 import FeistelBlocksOrder
from llmscale.data.shards.dataset_source import SetLocation, open_set
from llmscale.data.shards.manifest import ShardInfo
from llmscale.errors import DataError

MakeLocation = Callable[..., SetLocation]
OLD = {"algorithm": "feistel-blocks-1", "shuffle": True, "num_canonical_nodes": 48, "block_size": 32768}


@pytest.fixture
def make_location(shared_set: Path) -> MakeLocation:
    """A set of `num_shards` shards that are together as large as asked; nothing of it can be read."""

    def make(num_shards: int, gib: float, *, is_shuffled: bool = True, remote: str | None = None) -> SetLocation:
        location = open_set(str(shared_set))
        shard_bytes = int(gib * 2**30 / num_shards)
        shards = tuple(ShardInfo(f"shard.{i:05d}.mds", shard_bytes, "", 1000) for i in range(num_shards))
        train = dataclasses.replace(location.manifest.splits["train"], shards=shards)
        request = {**location.manifest.request, "--no-shuffle": not is_shuffled}
        manifest = dataclasses.replace(location.manifest, splits={"train": train}, request=request)
        return dataclasses.replace(location, manifest=manifest, remote=remote)

    return make


def _rows_and_block(location: SetLocation, **settings: object) -> tuple[object, object]:
    identity = build_order(location, FeedSettings(seed=1, **settings)).identity("")
    assert identity["algorithm"] == "feistel-rounds-2"
    return identity["num_canonical_nodes"], identity["block_size"]


@pytest.mark.parametrize(
    ("num_shards", "gib", "is_shuffled", "remote", "expected"),
    [
        (1, 0.01, True, None, (1, None)),
        (128, 8, True, None, (1, None)),
        (128, 8, False, "s3://b/set", (1, None)),
        (4000, 2, False, "s3://b/set", (48, None)),  # rows cost nothing there
        (129, 8.01, True, None, (48, 32768)),
        (3061, 191, True, "s3://b/set", (48, 32768)),
        (3061, 191, False, "s3://b/set", (48, 32768)),
        (3061, 191, False, None, (48, None)),  # in order and at hand: shuffled as a whole
        (20, 191, False, None, (1, None)),
    ],
)
def test_blocks_are_for_sets_too_large_for_a_node(
    make_location: MakeLocation,
    num_shards: int,
    gib: float,
    is_shuffled: bool,
    remote: str | None,
    expected: tuple[int, int | None],
) -> None:
    location = make_location(num_shards, gib, is_shuffled=is_shuffled, remote=remote)
    assert _rows_and_block(location) == expected


def test_a_cache_limit_says_what_a_node_holds(make_location: MakeLocation) -> None:
    location = make_location(20, 2, remote="s3://b/set")
    assert _rows_and_block(location, cache_limit_bytes=1 << 30) == (48, 32768)
    assert _rows_and_block(location, cache_limit_bytes=3 << 30) == (1, None)
    assert WHOLE_SET_BYTES == 8 << 30


def test_settings_come_before_what_is_saved_and_that_before_defaults(make_location: MakeLocation) -> None:
    location = make_location(3061, 191)
    saved = {"algorithm": "feistel-rounds-2", "shuffle": True, "num_canonical_nodes": 12, "block_size": None}
    assert _rows_and_block(location, num_canonical_nodes=6) == (6, 32768)
    assert _rows_and_block(location, saved_order=saved) == (12, None)
    assert _rows_and_block(location, saved_order=saved, num_canonical_nodes=6, block_size=5) == (6, 5)


def test_a_run_keeps_the_order_it_began_with(shared_set: Path) -> None:
    location = open_set(str(shared_set))
    sizes = [shard.num_samples for shard in location.manifest.splits["train"].shards]
    positions = np.arange(3 * sum(sizes))
    was = FeistelBlocksOrder(sizes, seed=7, num_canonical_nodes=48, block_size=32768)
    kept = build_order(location, FeedSettings(seed=7, saved_order=OLD))
    assert np.array_equal(kept.sample_ids(positions), was.sample_ids(positions))
    assert {key: kept.identity("")[key] for key in OLD} == OLD
    new = build_order(location, FeedSettings(seed=7))
    assert not np.array_equal(new.sample_ids(positions), was.sample_ids(positions))


def test_an_order_is_kept_when_its_set_moves(make_location: MakeLocation) -> None:
    """A large old set is shuffled as a whole where it is at hand; a run that began so goes on so from a remote copy."""
    begun = build_order(make_location(3061, 191, is_shuffled=False), FeedSettings(seed=1)).identity("")
    moved = make_location(3061, 191, is_shuffled=False, remote="s3://b/set")
    assert build_order(moved, FeedSettings(seed=1, saved_order=begun)).identity("") == begun


def test_an_unknown_algorithm_shows_in_the_identity(shared_set: Path) -> None:
    """So the comparison on resume refuses it by name."""
    saved = {**OLD, "algorithm": "quantum-9"}
    order = build_order(open_set(str(shared_set)), FeedSettings(seed=7, saved_order=saved))
    assert order.identity("")["algorithm"] == "feistel-rounds-2"


@pytest.mark.parametrize("value", ["48", 0, -1, True, 1.5, 1 << 70, [48]])
@pytest.mark.parametrize("name", ["num_canonical_nodes", "block_size"])
def test_a_saved_order_that_is_none_is_refused(shared_set: Path, name: str, value: object) -> None:
    with pytest.raises(DataError, match=f"The saved order of samples has {name}"):
        build_order(open_set(str(shared_set)), FeedSettings(seed=7, saved_order={**OLD, name: value}))
