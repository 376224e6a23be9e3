"""Which samples a run sees, from its beginning to its end. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmscale.checkpoint.run_state import RunState
from llmscale.config.limits import MAX_BATCH
from llmscale.config.run_config import RunConfig
from llmscale.data.mixture import MAX_PERIOD, RECORDED_SETS, MixedOrder, PlacedStage, TrainingSets, place_stages
from llmscale.data.order.sample_order import (
    MOST_POSITIONS,
    OrderSettings,
    Ranges,
    SampleOrder,
    SkippingOrder,
    StreamOrder,
    build_order,
    stream_positions,
)
from llmscale.errors import CheckpointError
from llmscale.training.run_inputs import PreparedRun
from llmscale.training.skipped_steps import SKIPPED_KEY, Skip, as_plain_skips, place_skips, ranges, saved_skips

#: The key of a run's identity under which a checkpoint keeps the proportions of a mix as they were and will be.
STAGES_KEY = "stages"
BATCHES_KEY = "batches"
#: Batch sizes of a run, ascending: steps done, samples seen, and the size from there on.
Batches = tuple[tuple[int, int, int], ...]
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
    batches: Batches

    def samples_after(self, steps: int) -> int:
        """Return the samples that the run has seen after so many steps. Raises CheckpointError where no checkpoint
        recorded it."""
        for done, seen, size in reversed(self.batches):
            if done <= steps:
                return seen + (steps - done) * size
        raise CheckpointError(f"the checkpoint did not record the batch size of step {steps + 1}.")

    def drawn(self, num_samples: int) -> np.ndarray:
        """Return how many of the run's first samples each set of the mix has, [sets]."""
        assert self.mix is not None
        skipped = ranges(self.skips)
        end = int(stream_positions(np.array([num_samples]), skipped)[0])
        drawn = self.mix.drawn_before(end)
        for first, behind in skipped:
            if first < end:
                drawn = drawn - self.mix.drawn_before(behind) + self.mix.drawn_before(first)
        return drawn

    def set_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Index of each sample's set, [n]."""
        return np.zeros(len(sample_ids), np.int64) if self.mix is None else self.mix.set_of(sample_ids)


def build_stream(run: PreparedRun, state: RunState | None) -> SampleStream:
    """Return the samples of a new run, or of one that continues a checkpoint. Raises CheckpointError, ConfigError,
    DataError."""
    size = run.resolved.plan.global_batch_size
    skips = place_skips(run.config.skip_steps, state, size)
    stages = _stages(run, state, ranges(skips)) if run.sets.recipe else ()
    step, seen = (state.step, state.samples_seen) if state else (0, 0)
    batches = tuple(known for known in saved_batches(state) if known[0] < step) if state else ()
    if not batches or batches[-1][-1] != size:
        batches += ((step, seen, size),)
    stream = _compose(run.config, run.sets, state.saved_order if state else {}, stages, skips, batches)
    return replace(stream, identity=stream.identity | {RECORDED_SETS: _describe_sets(run, stream)})


def _describe_sets(run: PreparedRun, stream: SampleStream) -> dict[str, dict[str, object]]:
    """Return each set's place, content, and samples in the whole run, by its name; a single set's name is empty."""
    total = stream.samples_after(run.resolved.total_steps)
    drawn = [total] if stream.mix is None else stream.drawn(total).tolist()
    names = run.sets.names if run.sets.recipe else ("",)
    return {
        name: {
            "data": at.name if "://" in at.name else os.path.abspath(at.name),
            "fingerprint": at.manifest.fingerprint,
            "samples": samples,
        }
        for name, at, samples in zip(names, run.sets.locations, drawn, strict=True)
    }


def stream_of_checkpoint(config: RunConfig, sets: TrainingSets, state: RunState) -> SampleStream:
    """Return the samples that a checkpoint's run saw and would see. Raises CheckpointError, DataError."""
    stages = saved_stages(state.identity, len(sets.names)) if sets.recipe else ()
    if sets.recipe and not stages:
        raise CheckpointError(f"the checkpoint's state is damaged: it has no {STAGES_KEY} of the sets of {sets.name}.")
    stream = _compose(config, sets, state.saved_order, stages, saved_skips(state.identity), saved_batches(state))
    if stream.identity["order"] != state.identity.get("order"):
        raise CheckpointError("the checkpoint's order of samples is none that this version of llmscale knows.")
    return stream


def _compose(
    config: RunConfig,
    sets: TrainingSets,
    saved: Mapping[str, object],
    stages: tuple[PlacedStage, ...],
    skips: tuple[Skip, ...],
    batches: Batches,
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
    identity[BATCHES_KEY] = [list(known) for known in batches]
    if skips:
        identity[SKIPPED_KEY] = as_plain_skips(skips)
    order: StreamOrder = mix or orders[0]
    return SampleStream(SkippingOrder(order, ranges(skips)) if skips else order, identity, mix, skips, batches)


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


def saved_batches(state: RunState) -> Batches:
    """Return the batch sizes that a checkpoint recorded; none where it recorded none and they differed. Raises
    CheckpointError."""
    size = state.identity.get("global_batch_size")
    is_one_size = type(size) is int and 0 < size <= MAX_BATCH and state.samples_seen == state.step * size
    listed = state.identity.get(BATCHES_KEY, [[0, 0, size]] if is_one_size else [])
    rows = [row if isinstance(row, list) else [] for row in listed] if isinstance(listed, list) else [[]]
    is_legal = all(len(row) == 3 and all(type(n) is int and 0 <= n <= MOST_POSITIONS for n in row) for row in rows)
    if not is_legal or not all(0 < row[2] <= MAX_BATCH for row in rows):
        raise CheckpointError(f"the checkpoint's state is damaged: {BATCHES_KEY} is {str(listed)[:80]!r}.")
    return tuple((steps, samples, size) for steps, samples, size in rows)


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
