"""Open a model: a run's newest checkpoint, one checkpoint, or a folder of transformers.

Everything except the weights is read first, so that mistakes are reported early. Torch is imported with the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.hf_config import CONFIG_NAME
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import find_weights_files
from llmscale.checkpoint.hf_write import open_published
from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.checkpoint.manifest import STATE_NAME, CheckpointManifest, read_checkpoint
from llmscale.checkpoint.run_state import RunState, SavedRun, load_run_state
from llmscale.config.hf_model import PREFIX, PublishedModel, read_published_model
from llmscale.config.resolve import SetFacts, resolve_shape
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.data.mixture import TrainingSets, open_kept_sets, open_recorded_sets, open_training_sets
from llmscale.data.shards.cache import fetch_tokenizer
from llmscale.data.shards.manifest import check_set_matches
from llmscale.data.tokenizers.load_tokenizer import check_tokenizer_of_weights, load_set_tokenizer, load_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.untrusted.documents import Rules, load_json

if TYPE_CHECKING:
    from llmscale.evaluate.weights import Weights
    from llmscale.model.gpt import GPT


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded."""

    folder: Path
    """Folder of the checkpoint, or the transformers folder."""
    step: int | None
    """Step of a checkpoint; None for a transformers folder."""
    shape: GPTShape
    tokenizer: Tokenizer
    sets: TrainingSets | None
    """Datasets to validate on, or None."""
    no_sets: str
    """Reason why `sets` is None, with the remedy; empty otherwise."""
    published: PublishedModel | None
    """Published model that it is, or was initialised from."""
    chat_template: str | None
    """Template of the conversations that it was trained on; None without conversations."""
    open_weights: Callable[[], Weights]
    """Open its files. Raises CheckpointError for damaged weights, or weights of another model."""

    def load_model(self) -> GPT:
        """Load it onto this machine's first GPU, or its CPU, in eval mode and fp32. Raises CheckpointError."""
        import torch

        from llmscale.model.gpt import GPT

        # Before a model is built, because its size is known only from the files.
        weights = self.open_weights()
        model = GPT(self.shape, seed=0)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(weights.read(name, 0, tensor.numel()).view_as(tensor))
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint whose bytes were verified, without its tensors."""

    folder: Path
    manifest: CheckpointManifest
    state: RunState
    config: RunConfig
    shape: GPTShape
    sets: TrainingSets
    """Descriptions of the datasets that it was trained on; shards may be missing."""
    tokenizer: Tokenizer
    published: PublishedModel | None
    """Published model that it was initialised from."""

    def open_base(self, place: str | None, progress: Callable[[int], object]) -> Weights | None:
        """Open the weights beside its adapters, at `place` or where they were; None without adapters.

        Raises CheckpointError, and ConfigError for a place that has no use.
        """
        if not self.state.base:
            if place is not None:
                raise ConfigError(f"--base {place} has no effect: {self.folder} holds a model, not adapters. Drop it.")
            return None
        from llmscale.evaluate.weights import open_base_weights

        return open_base_weights(SavedRun(self.folder, self.manifest, self.state), place, progress)


def open_trained_checkpoint(
    folder: Path, progress: Callable[[int], object] = lambda num_bytes: None, *, given: str | None = None
) -> TrainedCheckpoint:
    """Verify a checkpoint and read its description. `progress` gets the bytes verified since the last call.

    The shape is that of the checkpoint's configuration. The tokenizer is the run folder's copy, or the dataset's.
    Raises CheckpointError for a damaged checkpoint, DataError when the tokenizer is missing.
    """
    checkpoint = read_checkpoint(folder)
    if damage := checkpoint.find_damage(progress=progress):
        raise CheckpointError(damage)
    state = load_run_state(folder)
    config = build_run_config(dict(state.config), f"{folder / STATE_NAME}: ")
    run = folder.resolve().parent.parent
    sets = open_kept_sets(run, str(state.identity.get("data")), config.data)
    if sets is None:
        remedy = f"Its tokenizer is needed: put the set back, or copy the folder `dataset` of the run to {run}."
        sets = open_trained_sets(folder, state, config, remedy, given)
        fetch_tokenizer(sets.first)
    made = sets.manifest
    tokenizer = load_set_tokenizer(sets.first.folder, made)
    shape = resolve_shape(config, SetFacts(made.vocab_size, made.seq_len, sets.num_train_samples, made.eot_token))
    published = open_published(run, config)
    return TrainedCheckpoint(folder, checkpoint.manifest, state, config, shape, sets, tokenizer, published)


def open_trained_sets(folder: Path, state: RunState, config: RunConfig, remedy: str, given: str | None) -> TrainingSets:
    """Open the datasets of a configuration. Raises DataError unless they are those of the checkpoint.

    `given` is the user's --data, as for `open_recorded_sets`.
    """
    is_given = given == config.data
    try:
        sets = open_recorded_sets(config.data, config.data_cache, given, state.identity)
    except (ConfigError, DataError) as error:
        is_missing = "://" not in config.data and not Path(config.data).exists()
        if is_missing:
            why = "does not exist here"
        else:
            why = f"cannot be opened: {str(error).rstrip('.')}"
    else:
        if sets.fingerprint == state.identity.get("data"):
            return sets
        if is_given:
            why = f"is not what {folder} was trained on"
        else:
            why = "is another dataset now"
    if is_given:
        named = f"--data {given}"
    else:
        named = f"{folder} was trained on {config.data}, which"
    raise DataError(f"{named} {why}. {remedy}")


def is_hf_folder(path: Path) -> bool:
    """Return whether a path is a transformers folder; its config.json names a model type, a run folder's does not.

    Raises ConfigError for a damaged config.json.
    """
    config = path / CONFIG_NAME
    if not config.is_file():
        return False
    return "model_type" in load_json(config, Rules(ConfigError, not_finite=True))


def find_model(path: Path, report: Callable[[str], None], step: int | None = None) -> Path:
    """Return the folder of weights that `path` names. Raises CheckpointError when none is found."""
    if not is_hf_folder(path):
        return find_checkpoint(path, report, step=step)
    if step is not None:
        raise CheckpointError(f"{path} is a folder of transformers, and --step chooses among a run's checkpoints.")
    find_weights_files(path)
    return path


def open_model(
    folder: Path,
    data: str | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
    *,
    with_sets: bool = False,
    base: str | None = None,
) -> ModelSource:
    """Verify a folder that `find_model` found, and open the dataset `data` or, `with_sets`, the run's.

    `base` is the new place of the weights beside a run's adapters. `progress` gets the bytes verified since the last
    call. Raises ConfigError, CheckpointError, DataError.
    """
    if is_hf_folder(folder):
        if base is not None:
            raise ConfigError(f"--base {base} has no effect: {folder} holds a model, not adapters. Drop it.")
        return _open_hf_folder(folder, data)
    trained = open_trained_checkpoint(folder, progress, given=data)
    sets = None
    no_sets = ""
    if data is not None:
        if os.path.abspath(data) == os.path.abspath(trained.config.data):
            identity = trained.state.identity
        else:
            identity = None
        sets = open_training_sets(data, identity=identity)
        manifest = trained.sets.manifest
        check_set_matches(
            sets.manifest,
            data,
            vocab_size=manifest.vocab_size,
            seq_len=manifest.seq_len,
            tokenizer_sha256=manifest.tokenizer_sha256,
        )
    elif with_sets:
        remedy = "Name it with --data SET, or use --val-samples 0."
        try:
            sets = open_trained_sets(folder, trained.state, trained.config, remedy, given=None)
        except DataError as error:
            no_sets = str(error)
    state = trained.state
    shape = trained.shape
    opened_base = trained.open_base(base, progress)

    def open_weights() -> Weights:
        from llmscale.evaluate.weights import open_stored

        return open_stored(folder, shape, opened_base)

    return ModelSource(
        folder,
        state.step,
        shape,
        trained.tokenizer,
        sets,
        no_sets,
        trained.published,
        trained.sets.chat_template,
        open_weights,
    )


def _open_hf_folder(folder: Path, data: str | None) -> ModelSource:
    published = read_published_model("the model", f"{PREFIX}{folder}")
    tokenizer = load_tokenizer(f"{PREFIX}{folder}")
    if data is None:
        sets = None
    else:
        sets = open_training_sets(data)
    if sets is not None:
        fetch_tokenizer(sets.first)
        check_tokenizer_of_weights(sets.first.folder, sets.manifest, folder)
        if sets.manifest.seq_len > published.shape.seq_len:
            raise DataError(
                f"{data} has samples of {sets.manifest.seq_len:,} tokens, and {folder} has positions for "
                f"{published.shape.seq_len:,}. Prepare the data with --seq-len {published.shape.seq_len} or less."
            )

    if sets:
        no_sets = ""
    else:
        no_sets = f"{folder} is a folder of transformers, which names no dataset. Name one with --data SET."

    def open_weights() -> Weights:
        from llmscale.evaluate.weights import Published

        return Published(published, find_weights_files(folder))

    return ModelSource(folder, None, published.shape, tokenizer, sets, no_sets, published, None, open_weights)
