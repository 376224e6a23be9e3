"""From the user's settings to a feed."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.data.feed import Feed, FeedPlan
from llmscale.data.location import SetLocation
from llmscale.data.order import DEFAULT_BLOCK_SIZE, DEFAULT_CANONICAL_NODES, SampleOrder
from llmscale.data.shards import TokenShards


@dataclass(frozen=True)
class FeedSettings:
    """How the training split is ordered and read."""

    seed: int
    """Of the sample order."""
    shuffle: bool = True
    """False: the order of the set, the same in every epoch."""
    num_canonical_nodes: int = DEFAULT_CANONICAL_NODES
    """Rows that are dealt to nodes whole. Part of the order: leave it as it is when the nodes change."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Samples of a row that are shuffled together."""
    num_workers: int = 0
    """Processes per rank that read ahead; 0 reads in the training process (30 us a sample)."""
    pin_memory: bool = False
    """Page-lock micro-batches, for asynchronous copies to a GPU."""
    cache_limit_bytes: int | None = None
    """Of a remote set's local cache; None is no limit."""


def build_order(location: SetLocation, settings: FeedSettings, split: str = "train") -> SampleOrder:
    """The sample order of a split, from the manifest alone."""
    shards = location.manifest.splits[split].shards
    return SampleOrder(
        [shard.num_samples for shard in shards],
        seed=settings.seed,
        shuffle=settings.shuffle,
        num_canonical_nodes=settings.num_canonical_nodes,
        block_size=settings.block_size,
    )


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
