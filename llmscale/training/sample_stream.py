"""The samples of a run: a pure function of its configuration and of the checkpoint that it resumes. No torch.

`--skip-steps A:B` leaves the batches of steps A up to, not including, B out of the stream, permanently. Several ranges
apply in their order, each to the step numbers that result from those before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.checkpoint.manifest import STATE_NAME
from llmscale.checkpoint.run_state import RunState, load_run_state
from llmscale.config.batch_plan import Batches, samples_after
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.data.mixture import (
    MAX_PERIOD,
    RECORDED_SETS,
    MixedOrder,
    MixedShards,
    PlacedStage,
    TrainingSets,
    open_recorded_sets,
    place_stages,
)
from llmscale.data.order.sample_order import (
    MOST_POSITIONS,
    MovedOrder,
    OrderSettings,
    Ranges,
    SampleOrder,
    StreamOrder,
    build_order,
    join_ranges,
    stream_positions,
)
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.limits import MAX_BATCH
from llmscale.training.inputs import parse_skip
from llmscale.untrusted.documents import Rules, build

_T = TypeVar("_T")

#: Keys of a run's identity: a mixture's proportions, past and future; batch sizes; and skipped ranges.
STAGES_KEY = "stages"
BATCHES_KEY = "batches"
SKIPPED_KEY = "skipped"
_MIX_ALGORITHM = "mix-1"
#: Keys of an order's identity that a run's identity has under other names.
_ELSEWHERE = ("seed", "set_fingerprint", "num_samples")


_Position = Annotated[int, Field(ge=0, le=MOST_POSITIONS)]
_SavedBatch = tuple[_Position, _Position, Annotated[int, Field(gt=0, le=MAX_BATCH)]]
_SavedStage = tuple[_Position, tuple[Annotated[int, Field(ge=0, le=MAX_PERIOD)], ...]]


@dataclass(frozen=True)
class Skip:
    """A range of samples that a run leaves out."""

    steps: str
    """The range as the user gave it, A:B: repeating the flag on a later start skips nothing more."""
    begin: _Position
    """Stream position of the first skipped sample."""
    end: _Position
    """Stream position after the last skipped sample."""


@dataclass(frozen=True)
class SampleStream:
    """The samples of a run by position."""

    order: StreamOrder
    """The order of the run: position g is its (g + 1)-th sample."""
    identity: dict[str, object]
    """The stream's part of a checkpoint's identity."""
    mix: MixedOrder | None
    """The order of a mixture, skipped samples included; None for one dataset."""
    skips: tuple[Skip, ...]
    batches: Batches

    def samples_after(self, steps: int) -> int:
        """Return the samples seen after `steps` steps."""
        return samples_after(self.batches, steps)

    def samples_by_set(self, num_samples: int) -> np.ndarray:
        """Return how many of the run's first samples come from each dataset of the mixture, [sets]."""
        assert self.mix is not None
        skipped = skipped_ranges(self.skips)
        end = int(stream_positions(np.array([num_samples]), skipped)[0])
        counts = self.mix.drawn_before(end)
        for first, behind in skipped:
            if first < end:
                counts = counts - self.mix.drawn_before(behind) + self.mix.drawn_before(first)
        return counts

    def set_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the index of each sample's dataset, [n]."""
        if self.mix is None:
            return np.zeros(len(sample_ids), np.int64)
        return self.mix.set_of(sample_ids)


def build_stream(config: RunConfig, sets: TrainingSets, resolved: ResolvedRun, state: RunState | None) -> SampleStream:
    """Return the samples of a new run, or of one that resumes a checkpoint.

    Raises CheckpointError, ConfigError, DataError.
    """
    step, seen = (state.step, state.samples_seen) if state else (0, 0)
    if state:
        batches = tuple(known for known in saved_batches(state) if known[0] < step)
    else:
        batches = ()
    now = resolved.plan.batches_from(step, seen)
    batches += now[1:] if batches and batches[-1][-1] == now[0][-1] else now
    skips = place_skips(config.skip_steps, state, batches)
    stages: tuple[PlacedStage, ...] = ()
    if sets.recipe is not None:
        samples = samples_after(batches, max(step, resolved.total_steps))
        if state:
            saved = saved_stages(state.identity, len(sets.names))
        else:
            saved = ()
        skipped = skipped_ranges(skips)
        stages = place_stages(sets.recipe, samples, batches[-1][-1], saved=saved, seen=seen, skipped=skipped)
    stream = _compose(config, sets, state.saved_order if state else {}, stages, skips, batches)
    described = _describe_sets(sets, stream, resolved.total_steps)
    return replace(stream, identity=stream.identity | {RECORDED_SETS: described})


def _describe_sets(sets: TrainingSets, stream: SampleStream, total_steps: int) -> dict[str, dict[str, object]]:
    """Return each dataset's path, content and samples in the run by its name, which is empty outside a mixture."""
    total = stream.samples_after(total_steps)
    if stream.mix is None:
        counts = [total]
    else:
        counts = stream.samples_by_set(total).tolist()
    names = sets.names if sets.recipe else ("",)
    return {
        name: {
            "data": at.name if "://" in at.name else os.path.abspath(at.name),
            "fingerprint": at.manifest.fingerprint,
            "samples": samples,
        }
        for name, at, samples in zip(names, sets.locations, counts, strict=True)
    }


def stream_of_checkpoint(config: RunConfig, sets: TrainingSets, state: RunState) -> SampleStream:
    """Return the samples that a checkpoint's run saw and would see. Raises CheckpointError, DataError."""
    if sets.recipe:
        stages = saved_stages(state.identity, len(sets.names))
    else:
        stages = ()
    if sets.recipe and not stages:
        raise CheckpointError(f"the checkpoint's state is damaged: it lacks the {STAGES_KEY} of {sets.name}.")
    stream = _compose(config, sets, state.saved_order, stages, saved_skips(state.identity), saved_batches(state))
    if stream.identity["order"] != state.identity.get("order"):
        raise CheckpointError("this version of llmscale does not know the checkpoint's order of samples.")
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
        build_order(location, _order_settings(config, _of_set(saved, name) if sets.recipe else saved))
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
        identity[SKIPPED_KEY] = [asdict(skip) for skip in skips]
    order: StreamOrder = mix or orders[0]
    if config.overfit_batch is not None:
        num_repeated = config.overfit_batch
        order = MovedOrder(order, lambda positions: positions % num_repeated)
    if skips:
        order = MovedOrder(order, partial(stream_positions, skipped=skipped_ranges(skips)))
    return SampleStream(order, identity, mix, skips, batches)


def _order_settings(config: RunConfig, saved_order: Mapping[str, object]) -> OrderSettings:
    return OrderSettings(
        seed=config.seed,
        shuffle=config.shuffle,
        num_canonical_nodes=config.num_canonical_nodes,
        block_size=config.shuffle_block_size,
        saved_order=saved_order,
        cache_limit_bytes=cache_limit_bytes(config),
    )


def cache_limit_bytes(config: RunConfig) -> int | None:
    """Return --cache-limit-gib in bytes."""
    limit = config.cache_limit_gib
    if limit is None:
        return None
    return int(limit * 2**30)


def _read_saved(kind: type[_T], identity: Mapping[str, object], key: str) -> _T:
    """Return a list of a checkpoint's identity, empty if it is missing. Raises CheckpointError for another type."""
    values = {key: identity.get(key, [])}
    rules = Rules(CheckpointError)
    where = "the checkpoint's state is damaged"
    return build(dict[str, kind], values, rules, where)[key]  # type: ignore[valid-type]


def _damaged(key: str, value: object) -> CheckpointError:
    return CheckpointError(f"the checkpoint's state is damaged: {key} is {str(value)[:80]!r}.")


def saved_batches(state: RunState) -> Batches:
    """Return the batch sizes that a checkpoint recorded. Raises CheckpointError."""
    batches = _read_saved(tuple[_SavedBatch, ...], state.identity, BATCHES_KEY)
    if not batches or batches[0][:2] != (0, 0):
        raise _damaged(BATCHES_KEY, batches)
    return batches


def saved_stages(identity: Mapping[str, object], num_sets: int) -> tuple[PlacedStage, ...]:
    """Return the stages that a checkpoint recorded; none without a mixture, or with one of other datasets.

    Raises CheckpointError.
    """
    listed = _read_saved(tuple[_SavedStage, ...], identity, STAGES_KEY)
    begins = [begin for begin, _ in listed]
    are_legal = all(0 < sum(shares) <= MAX_PERIOD + len(shares) for _, shares in listed)
    if not are_legal or begins != sorted({0, *begins})[: len(begins)]:
        raise _damaged(STAGES_KEY, listed)
    # Other datasets are reported where identities are compared.
    is_of_sets = all(len(shares) == num_sets for _, shares in listed)
    if is_of_sets:
        return tuple(PlacedStage(begin, shares) for begin, shares in listed)
    return ()


def _of_set(saved: Mapping[str, object], name: str) -> Mapping[str, object]:
    by_set = saved.get("sets")
    if isinstance(by_set, Mapping):
        order = by_set.get(name)
    else:
        order = None
    return order if isinstance(order, Mapping) else {}


def _plain_identity(order: SampleOrder) -> dict[str, object]:
    return {key: value for key, value in order.identity("").items() if key not in _ELSEWHERE}


def place_skips(wanted: Sequence[str], state: RunState | None, batches: Batches) -> tuple[Skip, ...]:
    """Return the ranges that the run has skipped, and those that it is to skip.

    Raises ConfigError for steps that are done, CheckpointError for malformed ranges in the checkpoint.
    """
    if state:
        skips = list(saved_skips(state.identity))
    else:
        skips = []
    step = state.step if state else 0
    known = {skip.steps for skip in skips}
    for text in wanted:
        first, behind = parse_skip(text)
        name = f"{first}:{behind}"
        if name in known:
            continue
        if first <= step:
            raise ConfigError(
                f"--skip-steps {name}: step {first} is done, the checkpoint is at step {step}. Name steps from "
                f"{step + 1} on, or go back to a checkpoint before step {first} with --resume."
            )
        # First and last sample of the steps as they would be without this flag.
        ends = [samples_after(batches, first - 1), samples_after(batches, behind - 1) - 1]
        if max(ends) >= MOST_POSITIONS - sum(end - begin for begin, end in skipped_ranges(skips)):
            raise ConfigError(
                f"--skip-steps {name}: with {batches[-1][-1]:,} samples a step that is beyond any run. Name steps "
                "that the run has."
            )
        begin, last = stream_positions(np.array(ends), skipped_ranges(skips)).tolist()
        skips.append(Skip(name, begin, last + 1))
        known.add(name)
    return tuple(skips)


def check_skips(wanted: Sequence[str], total_steps: int) -> None:
    """Raise ConfigError for a range that is given twice or beyond the run. A repeated command skips nothing more."""
    known = set()
    for text in wanted:
        first, behind = parse_skip(text)
        name = f"{first}:{behind}"
        if name in known:
            raise ConfigError(f"--skip-steps {name} is given twice, and would do nothing more. Give it once.")
        if first > total_steps:
            raise ConfigError(
                f"--skip-steps {name}: the run ends at step {total_steps}, and the flag would do nothing. Name steps "
                "that the run has, or give more --steps."
            )
        known.add(name)


def skipped_ranges(skips: Sequence[Skip]) -> Ranges:
    """Return the skipped stream positions as ascending, disjoint ranges."""
    return join_ranges((skip.begin, skip.end) for skip in skips)


def saved_skips(identity: Mapping[str, object]) -> tuple[Skip, ...]:
    """Return the ranges that a checkpoint's run skipped. Raises CheckpointError."""
    skips = _read_saved(tuple[Skip, ...], identity, SKIPPED_KEY)
    if any(skip.begin >= skip.end for skip in skips):
        raise _damaged(SKIPPED_KEY, skips)
    return skips


@dataclass(frozen=True)
class StepSample:
    """One sequence of a global batch."""

    position: int
    """Number of samples that the run saw before it."""
    sample_id: int
    """Id within its dataset."""
    set_name: str
    shard: str
    """Path of the shard within the dataset's folder."""
    index: int
    """Index within the shard."""
    tokens: NDArray[np.unsignedinteger]
    """[seq_len + 1]."""


@dataclass(frozen=True)
class StepSamples:
    """The global batch of one step."""

    sets: TrainingSets
    samples: list[StepSample]


def find_step_samples(run: Path, step: int, given: str | None = None) -> StepSamples:
    """Return the samples of a step, counted from 1, of a run folder's current history or of a checkpoint's.

    They need no record: the checkpoint holds the order. `given` is the user's --data, as for `open_recorded_sets`.
    Raises CheckpointError without a complete checkpoint, ConfigError for a step that it has not done, DataError if the
    data have changed.
    """
    folder = find_checkpoint(run)
    state = load_run_state(folder)
    if step > state.step:
        raise ConfigError(f"{folder} covers steps 1 to {state.step:,}, not step {step}. Wait for the next checkpoint.")
    config = build_run_config(dict(state.config), f"{folder / STATE_NAME}: ")
    sets = open_recorded_sets(config.data, config.data_cache, given, state.identity)
    if sets.fingerprint != state.identity.get("data"):
        raise DataError(f"{config.data} is not what {folder} was trained on. Put the old data back.")
    stream = stream_of_checkpoint(config, sets, state)
    return StepSamples(sets, [sample for _, sample in read_step_samples(config, sets, stream, step)])


def read_step_samples(
    config: RunConfig, sets: TrainingSets, stream: SampleStream, step: int
) -> list[tuple[int, StepSample]]:
    """Return the samples of a step, counted from 1, each with its id in all datasets together. Raises DataError."""
    begin = stream.samples_after(step - 1)
    end = stream.samples_after(step)
    ids = stream.order.sample_ids(np.arange(begin, end)).tolist()
    windows = MixedShards(sets.locations, "train", cache_limit_bytes(config)).read(np.array(ids))
    return [
        (sample_id, StepSample(begin + number, *_locate(sets, sample_id), window))
        for number, (sample_id, window) in enumerate(zip(ids, windows, strict=True))
    ]


def _locate(sets: TrainingSets, sample_id: int) -> tuple[int, str, str, int]:
    """Return the id in its dataset, the dataset, the shard and the index there of an id that counts through all."""
    for name, location in zip(sets.names, sets.locations, strict=True):
        first = 0
        split = location.manifest.splits["train"]
        if sample_id >= split.num_samples:
            sample_id -= split.num_samples
            continue
        for shard in split.shards:
            if sample_id < first + shard.num_samples:
                return sample_id, name, f"train/{shard.name}", sample_id - first
            first += shard.num_samples
    raise DataError(f"no dataset has sample {sample_id}.")
