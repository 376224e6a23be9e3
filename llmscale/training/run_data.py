"""A run's training and validation data on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmscale.checkpoint.run_state import RunState
from llmscale.config.run_config import RunConfig
from llmscale.data.loader import Feed, FeedPlan, OrderSettings, build_order
from llmscale.data.mix.mixed_order import MixedOrder, PlacedStage, place_stages
from llmscale.data.mix.recipe import MAX_PERIOD
from llmscale.data.mix.training_sets import MixedShards, TrainingSets
from llmscale.data.order.rank_sharding import RankLayout
from llmscale.data.order.sample_order import SampleOrder
from llmscale.data.order.stream_order import MOST_POSITIONS, Ranges, SkippingOrder, StreamOrder
from llmscale.data.shards.token_shards import TokenShards, WindowReader
from llmscale.engine.process_group import World, is_gpu
from llmscale.errors import CheckpointError
from llmscale.training.run_inputs import PreparedRun
from llmscale.training.skipped_steps import SKIPPED_KEY, Skip, as_plain_skips, place_skips, ranges, saved_skips

#: The key of a run's identity under which a checkpoint keeps the proportions of a mix as they were and will be.
STAGES_KEY = "stages"
_MIX_ALGORITHM = "mix-1"
#: Of an order's identity, what a run's identity says under keys of its own.
_ELSEWHERE = ("seed", "set_fingerprint", "num_samples")


@dataclass(frozen=True)
class SampleStream:
    """Which samples a run sees, by position: a pure function of the configuration and of what was seen."""

    order: StreamOrder
    """Of the run: position g is its (g + 1)-th sample."""
    identity: dict[str, object]
    """What a checkpoint records of it."""
    mix: MixedOrder | None
    """Of several sets, what is left out included."""
    skips: tuple[Skip, ...]

    def set_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Index of each sample's set, [n]."""
        return np.zeros(len(sample_ids), np.int64) if self.mix is None else self.mix.set_of(sample_ids)


@dataclass(frozen=True)
class ValidationSplit:
    """Of one set."""

    name: str
    """Empty where there is but one set."""
    shards: WindowReader
    num_samples: int
    """Sequences per validation."""
    bytes_per_token: float
    """Of UTF-8, over the whole split."""


def build_stream(run: PreparedRun, state: RunState | None) -> SampleStream:
    """The samples of a run that begins, or that goes on from a checkpoint. Raises CheckpointError, ConfigError,
    DataError."""
    skips = place_skips(run.config.skip_steps, state, run.resolved.plan.global_batch_size)
    stages = _stages(run, state, ranges(skips)) if run.sets.recipe else ()
    return _compose(run.config, run.sets, state.saved_order if state else {}, stages, skips)


def stream_of_checkpoint(config: RunConfig, sets: TrainingSets, state: RunState) -> SampleStream:
    """The samples as a checkpoint says that its run saw and will see them. Raises CheckpointError, DataError."""
    stages = saved_stages(state.identity, len(sets.names)) if sets.recipe else ()
    if sets.recipe and not stages:
        raise CheckpointError(f"the checkpoint's state is damaged: it has no {STAGES_KEY} of the sets of {sets.name}.")
    stream = _compose(config, sets, state.saved_order, stages, saved_skips(state.identity))
    if stream.identity["order"] != state.identity.get("order"):
        raise CheckpointError("the checkpoint's order of samples is none that this version of llmscale knows.")
    return stream


def _compose(
    config: RunConfig,
    sets: TrainingSets,
    saved: Mapping[str, object],
    stages: tuple[PlacedStage, ...],
    skips: tuple[Skip, ...],
) -> SampleStream:
    orders = [
        build_order(location, order_settings(config, _of_set(saved, name) if sets.recipe else saved))
        for name, location in zip(sets.names, sets.locations, strict=True)
    ]
    mix: MixedOrder | None = None
    identity: dict[str, object] = {"order": _plain_identity(orders[0])}
    if sets.recipe is not None:
        mix = MixedOrder(orders, stages)
        by_set = {name: _plain_identity(order) for name, order in zip(sets.names, orders, strict=True)}
        identity = {
            "order": {"algorithm": _MIX_ALGORITHM, "sets": by_set},
            STAGES_KEY: [[stage.begin, list(stage.shares)] for stage in mix.stages],
        }
    if skips:
        identity[SKIPPED_KEY] = as_plain_skips(skips)
    order: StreamOrder = mix or orders[0]
    return SampleStream(SkippingOrder(order, ranges(skips)) if skips else order, identity, mix, skips)


def run_identity(run: PreparedRun, state: RunState) -> dict[str, object]:
    """What a checkpoint of this run records, when it goes on from `state`."""
    return run.identity(build_stream(run, state).identity)


def order_settings(config: RunConfig, saved_order: Mapping[str, object]) -> OrderSettings:
    """How a training split is ordered."""
    return OrderSettings(
        seed=config.seed,
        shuffle=config.shuffle,
        num_canonical_nodes=config.num_canonical_nodes,
        block_size=config.shuffle_block_size,
        saved_order=saved_order,
        cache_limit_bytes=cache_limit_bytes(config),
    )


def open_feed(run: PreparedRun, world: World, stream: SampleStream, *, start_sample: int) -> Feed:
    """This rank's micro-batches from stream position `start_sample` on. Raises DataError when a shard is not as it
    was."""
    plan = run.resolved.plan
    layout = RankLayout(world.rank, world.ranks_per_node)
    return Feed(
        _open_shards(run, "train"),
        stream.order,
        FeedPlan(layout, plan.micro_batch_size, plan.gradient_accumulation_steps),
        start_sample=start_sample,
        num_workers=run.config.num_workers,
        pin_memory=is_gpu(),
    )


def open_validation(run: PreparedRun, stream: SampleStream) -> tuple[ValidationSplit, ...]:
    """The validation splits; none when there are none, or they are never used. Each set of a mix has as large a part of
    --val-samples as it has of the run's samples, one at least."""
    if not run.config.val_every:
        return ()
    parts = [1.0] if stream.mix is None else list(parts_of_run(run, stream.mix))
    found = []
    for name, location, part in zip(run.sets.names, run.sets.locations, parts, strict=True):
        split = location.manifest.splits.get("val")
        if split is not None and split.num_samples:
            wanted = max(1, round(part * run.config.val_samples))
            shards = TokenShards(location, "val")
            shown = name if run.sets.recipe else ""
            found.append(ValidationSplit(shown, shards, min(wanted, split.num_samples), split.bytes_per_token))
    return tuple(found)


def parts_of_run(run: PreparedRun, mix: MixedOrder) -> np.ndarray:
    """Of each set, which part of all samples of the run are its own, [sets]."""
    total = run.resolved.total_steps * run.resolved.plan.global_batch_size
    return mix.drawn_before(total) / total


def _open_shards(run: PreparedRun, split: str) -> WindowReader:
    limit_bytes = cache_limit_bytes(run.config)
    if run.sets.recipe is None:
        return TokenShards(run.sets.first, split, cache_limit_bytes=limit_bytes)
    return MixedShards(run.sets.locations, split, limit_bytes)


def cache_limit_bytes(config: RunConfig) -> int | None:
    """--cache-limit-gib."""
    limit = config.cache_limit_gib
    return None if limit is None else int(limit * 2**30)


def _stages(run: PreparedRun, state: RunState | None, skipped: Ranges) -> tuple[PlacedStage, ...]:
    assert run.sets.recipe is not None
    size = run.resolved.plan.global_batch_size
    step, seen = (state.step, state.samples_seen) if state else (0, 0)
    total = seen + max(0, run.resolved.total_steps - step) * size
    saved = saved_stages(state.identity, len(run.sets.names)) if state else ()
    return place_stages(run.sets.recipe, total, size, saved=saved, seen=seen, skipped=skipped)


def saved_stages(identity: Mapping[str, object], num_sets: int) -> tuple[PlacedStage, ...]:
    """The stages that a checkpoint recorded; none where its run had no mix, or one of other sets. Raises
    CheckpointError."""
    listed = identity.get(STAGES_KEY, [])
    found: list[PlacedStage] = []
    for entry in listed if isinstance(listed, list) else [None]:
        stage = _parse_stage(entry)
        if stage is None or (stage.begin <= found[-1].begin if found else stage.begin != 0):
            raise CheckpointError(f"the checkpoint's state is damaged: {STAGES_KEY} is {str(listed)[:80]!r}.")
        found.append(stage)
    # Of other sets: the comparison of identities will say so.
    return tuple(found) if all(len(stage.shares) == num_sets for stage in found) else ()


def _parse_stage(entry: object) -> PlacedStage | None:
    """[begin, shares] as a checkpoint has it; None for anything else."""
    begin, shares = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
    if type(begin) is not int or begin > MOST_POSITIONS or not isinstance(shares, list):
        return None
    if not all(type(share) is int and 0 <= share <= MAX_PERIOD for share in shares) or not 0 < sum(
        shares
    ) <= MAX_PERIOD + len(shares):
        return None
    return PlacedStage(begin, tuple(shares))


def _of_set(saved: Mapping[str, object], name: str) -> Mapping[str, object]:
    by_set = saved.get("sets")
    order = by_set.get(name) if isinstance(by_set, Mapping) else None
    return order if isinstance(order, Mapping) else {}


def _plain_identity(order: SampleOrder) -> dict[str, object]:
    return {key: value for key, value in order.identity("").items() if key not in _ELSEWHERE}
