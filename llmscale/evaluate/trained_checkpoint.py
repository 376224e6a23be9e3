"""Everything of a checkpoint but its tensors: its run's configuration, its model's shape, and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.locate import read_state
from llmscale.checkpoint.manifest import CheckpointManifest, find_damage, load_manifest
from llmscale.checkpoint.published_record import PUBLISHED_NAME, PublishedRecord, load_record
from llmscale.checkpoint.run_state import RunState, parse_run_state
from llmscale.config.arguments import build_run_config
from llmscale.config.resolve import SetFacts, resolve_shape
from llmscale.config.run_config import RunConfig
from llmscale.data.mix.training_sets import TrainingSets, open_kept_sets, open_training_sets
from llmscale.data.shards.dataset_source import fetch_tokenizer
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import CheckpointError, ConfigError, DataError


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint whose every byte is as it was written, without its tensors."""

    folder: Path
    manifest: CheckpointManifest
    state: RunState
    config: RunConfig
    shape: GPTShape
    sets: TrainingSets
    """Descriptions of the sets that it was trained on; their shards may be missing."""
    tokenizer: Tokenizer
    record: PublishedRecord | None
    """The published model that it was made from."""

    def open_sets(self) -> TrainingSets:
        """Open the sets that it was trained on, with their shards. Raises DataError when they are not there."""
        return _open_sets(self.folder, self.state, self.config, "Name it with --data SET, or use --val-samples 0.")


def open_trained_checkpoint(
    folder: Path, progress: Callable[[int], object] = lambda num_bytes: None
) -> TrainedCheckpoint:
    """Verify a checkpoint and read its description. `progress` gets numbers of bytes that were verified.

    The shape comes from the configuration in the checkpoint, the tokenizer from the copy in the run folder, else from
    the set. Raises CheckpointError for a damaged checkpoint, DataError when there is no tokenizer.
    """
    damage = find_damage(folder, progress=progress)
    if damage:
        raise CheckpointError(damage)
    state = parse_run_state(read_state(folder))
    config = build_run_config(dict(state.config))
    run = folder.resolve().parent.parent
    sets = open_kept_sets(run, str(state.identity.get("data")), config.data)
    if sets is None:
        remedy = f"Its tokenizer is needed: put the set back, or copy the folder `dataset` of the run to {run}."
        sets = _open_sets(folder, state, config, remedy)
        fetch_tokenizer(sets.first)
    manifest = sets.manifest
    facts = SetFacts(manifest.vocab_size, manifest.seq_len, sets.num_train_samples, manifest.eot_token)
    tokenizer = load_set_tokenizer(sets.first.folder, manifest)
    shape = resolve_shape(config, facts)
    record = load_record(run / PUBLISHED_NAME)
    return TrainedCheckpoint(folder, load_manifest(folder), state, config, shape, sets, tokenizer, record)


def _open_sets(folder: Path, state: RunState, config: RunConfig, remedy: str) -> TrainingSets:
    """Open the sets that a configuration names. Raises DataError unless they are those of the checkpoint."""
    try:
        sets = open_training_sets(config.data, config.data_cache)
    except (ConfigError, DataError) as error:
        is_missing = "://" not in config.data and not Path(config.data).exists()
        why = "which does not exist here" if is_missing else f"which cannot be opened: {str(error).rstrip('.')}"
    else:
        if sets.fingerprint == state.identity.get("data"):
            return sets
        why = "which is another dataset now"
    raise DataError(f"{folder} was trained on {config.data}, {why}. {remedy}")
