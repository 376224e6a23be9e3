"""Which samples a step was made of, without a record: the order is a pure function, and a checkpoint has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.checkpoint.locate import find_checkpoint, read_state
from llmscale.checkpoint.run_state import RunState, parse_run_state
from llmscale.config import limits
from llmscale.config.arguments import build_run_config
from llmscale.data.mix.training_sets import MixedShards, TrainingSets, open_recorded_sets
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.training.run_data import cache_limit_bytes, stream_of_checkpoint
from llmscale.training.run_folder import METRICS_NAME
from llmscale.untrusted.documents import load_json_lines


@dataclass(frozen=True)
class StepSample:
    """One sequence of a global batch."""

    position: int
    """In the run: so many samples were seen before it."""
    sample_id: int
    """In its set."""
    set_name: str
    shard: str
    """File, relative to its set."""
    index: int
    """Within the shard."""
    tokens: NDArray[np.unsignedinteger]
    """[seq_len + 1]."""


@dataclass(frozen=True)
class StepSamples:
    """The global batch of one step."""

    sets: TrainingSets
    samples: list[StepSample]


def find_step_samples(run: Path, step: int, given: str | None = None) -> StepSamples:
    """Return the samples of a step, counted from 1, of a run folder's current history or of a checkpoint's.

    `given` is the user's --data, as for `open_recorded_sets`. Raises CheckpointError without a whole checkpoint,
    ConfigError for a step that is not done, DataError where the data are not what they were.
    """
    folder = find_checkpoint(run)
    state = parse_run_state(read_state(folder))
    config = build_run_config(dict(state.config))
    sets = open_recorded_sets(config.data, config.data_cache, given)
    if sets.fingerprint != state.identity.get("data"):
        raise DataError(f"{config.data} is not what {folder} was trained on. Put the old data back.")
    begin, end = _positions(run, state, step)
    ids = stream_of_checkpoint(config, sets, state).order.sample_ids(np.arange(begin, end))
    windows = MixedShards(sets.locations, "train", cache_limit_bytes(config)).read(ids)
    places = [_place(sets, int(sample_id)) for sample_id in ids]
    found = [
        StepSample(begin + number, *place, window)
        for number, (place, window) in enumerate(zip(places, windows, strict=True))
    ]
    return StepSamples(sets, found)


def _positions(run: Path, state: RunState, step: int) -> tuple[int, int]:
    """[begin, end) of a step in the run. The metrics know it whatever batch sizes the run had; the checkpoint, whose
    batch size is that of its last steps, where there are none."""
    seq_len, size = state.identity.get("seq_len"), state.identity.get("global_batch_size")
    if not (type(seq_len) is int and type(size) is int and seq_len > 0 and size > 0):
        raise CheckpointError("the checkpoint's state is damaged: it has no seq_len and global_batch_size.")
    seen = {0: 0, **_seen_by_step(run, seq_len, state.step), state.step: state.samples_seen}
    last = max(seen)
    if not 1 <= step <= last:
        raise ConfigError(
            f"{run} tells of steps 1 to {last:,}, and not of step {step}. The next checkpoint tells more."
        )
    before, after = max(known for known in seen if known < step), min(known for known in seen if known >= step)
    size, rest = divmod(seen[after] - seen[before], after - before)
    if rest or not 1 <= size <= limits.MAX_BATCH:
        raise ConfigError(
            f"steps {before + 1} to {after} of {run} had batches of several sizes, and the log does not say which had "
            "which. Name a step that was logged right behind another."
        )
    begin = seen[before] + (step - 1 - before) * size
    return begin, begin + size


def _seen_by_step(run: Path, seq_len: int, saved_step: int) -> dict[int, int]:
    """Samples seen by logged step, of what the run did last; nothing for a checkpoint without its run. Of steps behind
    the checkpoint only those of the start that saved it: a later one may draw other samples."""
    found: dict[int, int] = {}
    most: float = math.inf
    try:
        for record in load_json_lines(run / METRICS_NAME):
            step, tokens = record.get("step"), record.get("tokens_seen")
            if type(step) is not int:
                continue
            if record.get("event") == "start":
                found = {known: seen for known, seen in found.items() if known <= step}
                most = saved_step if step >= saved_step else math.inf
            if record.get("kind") == "train" and type(tokens) is int and step <= most:
                found[step] = tokens // seq_len
    except OSError:
        return {}
    return found


def _place(sets: TrainingSets, sample_id: int) -> tuple[int, str, str, int]:
    """Of an id that counts through all sets: the id in its set, the set, the shard, and the index there."""
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
    raise DataError(f"no set has sample {sample_id}.")
