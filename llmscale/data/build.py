"""From the user's settings to a feed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmscale.data.loader import Feed, FeedPlan
from llmscale.data.order import feistel_blocks_1
from llmscale.data.order.feistel_blocks_1 import FeistelBlocksOrder
from llmscale.data.order.sample_order import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CANONICAL_NODES,
    MOST_CANONICAL_NODES,
    Order,
    SampleOrder,
)
from llmscale.data.shards.dataset_source import SetLocation
from llmscale.data.shards.token_shards import TokenShards
from llmscale.errors import DataError

#: A set of this size, 4 billion tokens of two bytes, is read in the order of one shuffle: every node holds all of it.
WHOLE_SET_BYTES = 8 << 30


@dataclass(frozen=True)
class FeedSettings:
    """How the training split is ordered and read."""

    seed: int
    """Of the sample order."""
    shuffle: bool = True
    """False: the order of the set, the same in every epoch."""
    num_canonical_nodes: int | None = None
    """Rows that are dealt to nodes whole. Part of the order: leave it as it is when the nodes change."""
    block_size: int | None = None
    """Samples of a row that are shuffled together."""
    saved_order: Mapping[str, object] | None = None
    """The identity of the order that a run began with: its algorithm, and what the two settings above leave open."""
    num_workers: int = 0
    """Processes per rank that read ahead; 0 reads in the training process (30 us a sample)."""
    pin_memory: bool = False
    """Page-lock micro-batches, for asynchronous copies to a GPU."""
    cache_limit_bytes: int | None = None
    """Of a remote set's local cache; None is no limit."""


def build_order(location: SetLocation, settings: FeedSettings, split: str = "train") -> Order:
    """The sample order of a split, from the manifest alone. Raises DataError when the saved order is none of ours."""
    made = location.manifest.splits[split]
    sizes = [shard.num_samples for shard in made.shards]
    saved = settings.saved_order or {}
    num_rows = settings.num_canonical_nodes or _saved_number(saved, "num_canonical_nodes", MOST_CANONICAL_NODES)
    block_size = settings.block_size or _saved_number(saved, "block_size", 1 << 62)
    if saved.get("algorithm") == feistel_blocks_1.ALGORITHM:
        return FeistelBlocksOrder(
            sizes,
            seed=settings.seed,
            shuffle=settings.shuffle,
            num_canonical_nodes=num_rows or DEFAULT_CANONICAL_NODES,
            block_size=block_size or DEFAULT_BLOCK_SIZE,
        )
    if not saved and _is_read_in_blocks(location, sum(shard.bytes for shard in made.shards), settings):
        num_rows = num_rows or DEFAULT_CANONICAL_NODES
        block_size = block_size or DEFAULT_BLOCK_SIZE
    return SampleOrder(
        sizes, seed=settings.seed, shuffle=settings.shuffle, num_canonical_nodes=num_rows, block_size=block_size
    )


def _is_read_in_blocks(location: SetLocation, num_bytes: int, settings: FeedSettings) -> bool:
    """Whether a new run should need few shards at a time: of a set too large for a node. Where neighbours are
    strangers that costs no randomness; else only a set that has to be fetched is worth it."""
    limit_bytes = min(WHOLE_SET_BYTES, settings.cache_limit_bytes or WHOLE_SET_BYTES)
    return num_bytes > limit_bytes and (location.manifest.is_shuffled or location.remote is not None)


def _saved_number(saved: Mapping[str, object], name: str, most: int) -> int | None:
    value = saved.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return value
    raise DataError(f"The saved order of samples has {name} {value!r}; it must be in 1..{most:,}, or none.")


def build_feed(
    location: SetLocation,
    settings: FeedSettings,
    plan: FeedPlan,
    *,
    start_sample: int = 0,
    split: str = "train",
) -> Feed:
    """One rank's micro-batches from stream position `start_sample` on; see Feed. `location` comes from `open_set`."""
    return Feed(
        TokenShards(location, split, cache_limit_bytes=settings.cache_limit_bytes),
        build_order(location, settings, split),
        plan,
        start_sample=start_sample,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
    )
