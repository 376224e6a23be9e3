"""The order of one set's training split, for a run that begins or one that keeps its saved order. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmscale.data.order.sample_order import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CANONICAL_NODES,
    MOST_CANONICAL_NODES,
    SampleOrder,
)
from llmscale.data.shards.dataset_source import SetLocation
from llmscale.errors import DataError

#: A set of this size, 4 billion tokens of two bytes, is read in the order of one shuffle: every node holds all of it.
WHOLE_SET_BYTES = 8 << 30


@dataclass(frozen=True)
class OrderSettings:
    """How the training split of a set is ordered."""

    seed: int
    """Of the sample order."""
    shuffle: bool = True
    """False: the order of the set, the same in every epoch."""
    num_canonical_nodes: int | None = None
    """Rows that go to nodes whole. Part of the order: leave it as it is when the nodes change."""
    block_size: int | None = None
    """Samples of a row that are shuffled together."""
    saved_order: Mapping[str, object] | None = None
    """The identity of the order that a run began with: its algorithm, and what the two settings above leave open."""
    cache_limit_bytes: int | None = None
    """Of a remote set's local cache; None is no limit."""


def build_order(location: SetLocation, settings: OrderSettings) -> SampleOrder:
    """Return the sample order of the training split, from the manifest alone. Raises DataError for a malformed saved
    order."""
    sizes = [shard.num_samples for shard in location.manifest.splits["train"].shards]
    saved = settings.saved_order or {}
    num_rows = settings.num_canonical_nodes or _saved_number(saved, "num_canonical_nodes", MOST_CANONICAL_NODES)
    block_size = settings.block_size or _saved_number(saved, "block_size", 1 << 62)
    if not saved and _is_read_in_blocks(location, settings):
        num_rows = num_rows or DEFAULT_CANONICAL_NODES
        block_size = block_size or DEFAULT_BLOCK_SIZE
    return SampleOrder(
        sizes, seed=settings.seed, shuffle=settings.shuffle, num_canonical_nodes=num_rows, block_size=block_size
    )


def _is_read_in_blocks(location: SetLocation, settings: OrderSettings) -> bool:
    """Return whether a new run should need few shards at a time: for a set too large for a node. In a shuffled set that
    costs no randomness; any other set is worth it only if it has to be fetched."""
    num_bytes = sum(shard.bytes for shard in location.manifest.splits["train"].shards)
    limit_bytes = min(WHOLE_SET_BYTES, settings.cache_limit_bytes or WHOLE_SET_BYTES)
    return num_bytes > limit_bytes and (location.manifest.is_shuffled or location.remote is not None)


def _saved_number(saved: Mapping[str, object], name: str, most: int) -> int | None:
    value = saved.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return value
    raise DataError(f"The saved order of samples has {name} {value!r}; it must be in 1..{most:,}, or none.")
