"""Which samples a step was made of, without a record: the order is a pure function, and a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.checkpoint.locate import find_checkpoint, read_state
from llmscale.checkpoint.run_state import parse_run_state
from llmscale.config.arguments import build_run_config
from llmscale.data.mixture import MixedShards, TrainingSets, open_recorded_sets
from llmscale.errors import ConfigError, DataError
from llmscale.training.run_data import cache_limit_bytes, stream_of_checkpoint


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
    """Return the samples of a step, counted from 1 as it is printed, of a run folder's current history or of a
    checkpoint's.

    `given` is the user's --data, as for `open_recorded_sets`. Raises CheckpointError without a whole checkpoint,
    ConfigError for a step that it has not done, DataError where the data have changed.
    """
    folder = find_checkpoint(run)
    state = parse_run_state(read_state(folder))
    if step > state.step:
        raise ConfigError(
            f"{folder} tells of steps 1 to {state.step:,}, and not of step {step}. The next checkpoint tells more."
        )
    config = build_run_config(dict(state.config))
    sets = open_recorded_sets(config.data, config.data_cache, given, state.identity)
    if sets.fingerprint != state.identity.get("data"):
        raise DataError(f"{config.data} is not what {folder} was trained on. Put the old data back.")
    stream = stream_of_checkpoint(config, sets, state)
    begin, end = stream.samples_after(step - 1), stream.samples_after(step)
    ids = stream.order.sample_ids(np.arange(begin, end))
    windows = MixedShards(sets.locations, "train", cache_limit_bytes(config)).read(ids)
    places = [_place(sets, int(sample_id)) for sample_id in ids]
    found = [
        StepSample(begin + number, *place, window)
        for number, (place, window) in enumerate(zip(places, windows, strict=True))
    ]
    return StepSamples(sets, found)


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
