"""What a checkpoint's tensors belong to: its run's configuration, its model's shape, and the set with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.locate import read_state
from llmscale.checkpoint.manifest import CheckpointManifest, find_damage, load_manifest
from llmscale.checkpoint.run_state import RunState, parse_run_state
from llmscale.config.arguments import build_run_config
from llmscale.config.resolve import SetFacts, resolve_shape
from llmscale.config.run_config import RunConfig
from llmscale.data.mix.training_sets import TrainingSets, open_recorded_sets
from llmscale.data.shards.dataset_source import SetLocation, fetch_tokenizer
from llmscale.errors import CheckpointError, DataError


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint whose every byte is as it was written, without its tensors."""

    folder: Path
    manifest: CheckpointManifest
    state: RunState
    config: RunConfig
    shape: GPTShape
    sets: TrainingSets
    """What it was trained on."""

    @property
    def location(self) -> SetLocation:
        """The set, or the first one of several; the tokenizer's files are there."""
        return self.sets.first


def open_trained_checkpoint(
    folder: Path, progress: Callable[[int], object] = lambda num_bytes: None, *, given: str | None = None
) -> TrainedCheckpoint:
    """Verify a checkpoint and read what it says of itself. `progress` gets numbers of bytes that were verified.

    `given` is the user's --data: an address in the checkpoint is asked only where it is the same.

    The shape comes from the configuration in the checkpoint, the tokenizer from the data set that it names. Raises
    CheckpointError for a damaged checkpoint, DataError when the set is gone or is another one now.
    """
    damage = find_damage(folder, progress=progress)
    if damage:
        raise CheckpointError(damage)
    state = parse_run_state(read_state(folder))
    config = build_run_config(dict(state.config))
    sets = open_recorded_sets(config.data, config.data_cache, given, state.identity)
    if sets.fingerprint != state.identity.get("data"):
        raise DataError(
            f"the data set in {config.data} is not the one that {folder} was trained on, so its tokenizer may differ. "
            "Put the old set back."
        )
    fetch_tokenizer(sets.first)
    manifest = sets.manifest
    facts = SetFacts(manifest.vocab_size, manifest.seq_len, sets.num_train_samples, manifest.eot_token)
    return TrainedCheckpoint(folder, load_manifest(folder), state, config, resolve_shape(config, facts), sets)
