"""A run's training and validation data on one rank."""

from __future__ import annotations

from collections.abc import Mapping

from llmscale.data.loader import Feed, FeedPlan, FeedSettings, build_feed, build_order
from llmscale.data.order.rank_sharding import RankLayout
from llmscale.data.shards.token_shards import TokenShards
from llmscale.engine.process_group import World, is_gpu
from llmscale.training.run_inputs import PreparedRun

#: The identity of the order that a checkpoint recorded, which the run keeps.
SavedOrder = Mapping[str, object] | None


def feed_settings(run: PreparedRun, saved_order: SavedOrder = None) -> FeedSettings:
    """How the training split is ordered and read."""
    config = run.config
    return FeedSettings(
        seed=config.seed,
        shuffle=config.shuffle,
        num_canonical_nodes=config.num_canonical_nodes,
        block_size=config.shuffle_block_size,
        saved_order=saved_order,
        num_workers=config.num_workers,
        pin_memory=is_gpu(),
        cache_limit_bytes=None if config.cache_limit_gib is None else int(config.cache_limit_gib * 2**30),
    )


def run_identity(run: PreparedRun, saved_order: SavedOrder) -> dict[str, object]:
    """What a checkpoint of this run records as unchangeable."""
    order = build_order(run.location, feed_settings(run, saved_order))
    return run.identity(dict(order.identity(run.location.manifest.fingerprint)))


def open_feed(run: PreparedRun, world: World, *, start_sample: int, saved_order: SavedOrder = None) -> Feed:
    """This rank's micro-batches from stream position `start_sample` on. Raises DataError when a shard is not as it
    was."""
    plan = run.resolved.plan
    layout = RankLayout(world.rank, world.ranks_per_node)
    feed_plan = FeedPlan(layout, plan.micro_batch_size, plan.gradient_accumulation_steps)
    return build_feed(run.location, feed_settings(run, saved_order), feed_plan, start_sample=start_sample)


def open_validation(run: PreparedRun) -> TokenShards | None:
    """The validation split; None when there is none, or it is never used."""
    if not run.config.val_every or "val" not in run.location.manifest.splits:
        return None
    return TokenShards(run.location, "val")
