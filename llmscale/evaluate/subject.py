"""What is judged: a run's newest checkpoint, one checkpoint, or a folder of transformers. Everything about it but its
weights, so that what is wrong is said before they are loaded. No torch before `load_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.hf_config import CONFIG_NAME
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.locate import find_checkpoint
from llmscale.checkpoint.published_record import PublishedRecord, load_record
from llmscale.config.hf_model import PREFIX, read_published_model
from llmscale.data.mix.training_sets import TrainingSets, open_training_sets
from llmscale.data.shards.dataset_source import fetch_tokenizer
from llmscale.data.shards.manifest import check_set_matches
from llmscale.data.tokenizers.belongs_to_weights import check_tokenizer_of_weights
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.evaluate.trained_checkpoint import open_trained_checkpoint
from llmscale.untrusted.documents import Rules, load_json

if TYPE_CHECKING:
    from llmscale.model.gpt import GPT


@dataclass(frozen=True)
class Subject:
    """A model that can be loaded."""

    folder: Path
    """The checkpoint's, or the folder of transformers."""
    step: int | None
    """Of a checkpoint."""
    shape: GPTShape
    tokenizer: Tokenizer
    sets: TrainingSets | None
    """Sets to validate on; None where there are none."""
    no_sets: str
    """Why there are none, in a sentence with the remedy; empty where there are some."""
    record: PublishedRecord | None
    """The published model that it is, or was made from."""
    load_model: Callable[[], GPT]
    """Onto this machine's GPU, or its CPU, in eval mode and fp32."""


def is_hf_folder(path: Path) -> bool:
    """Whether a path is a folder of transformers, whose config.json names its kind of model; a run folder's is the
    run's. Raises ConfigError for a damaged one."""
    config = path / CONFIG_NAME
    if not config.is_file():
        return False
    return "model_type" in load_json(config, Rules(ConfigError, not_finite=True, large_numbers=True))


def find_subject(path: Path, report: Callable[[str], None], step: int | None = None) -> Path:
    """The folder of the weights that `path` names. Raises CheckpointError where there are none."""
    if not is_hf_folder(path):
        return find_checkpoint(path, report, step=step)
    if step is not None:
        raise CheckpointError(f"{path} is a folder of transformers, and --step chooses among a run's checkpoints.")
    return path


def open_subject(
    folder: Path, data: str | None, progress: Callable[[int], object], *, with_sets: bool = True
) -> Subject:
    """Verify what `find_subject` found, and open the set `data`, else the run's own unless `with_sets` is false.
    `progress` gets numbers of bytes that were verified. Raises ConfigError, CheckpointError, DataError."""
    if is_hf_folder(folder):
        return _open_hf_folder(folder, data)
    trained = open_trained_checkpoint(folder, progress)

    def load_model() -> GPT:
        from llmscale.evaluate.load_model import load_checkpoint_model

        return load_checkpoint_model(trained)

    sets, no_sets = None, ""
    if data is not None:
        sets = open_training_sets(data)
        manifest = trained.sets.manifest
        check_set_matches(
            sets.manifest,
            data,
            vocab_size=manifest.vocab_size,
            seq_len=manifest.seq_len,
            tokenizer_sha256=manifest.tokenizer_sha256,
        )
    elif with_sets:
        try:
            sets = trained.open_sets()
        except DataError as error:
            no_sets = str(error)
    step, record = trained.state.step, trained.record
    return Subject(folder, step, trained.shape, trained.tokenizer, sets, no_sets, record, load_model)


def _open_hf_folder(folder: Path, data: str | None) -> Subject:
    published = read_published_model("eval", f"{PREFIX}{folder}")
    tokenizer = load_tokenizer(f"{PREFIX}{folder}")
    sets = None if data is None else open_training_sets(data)
    if sets is not None:
        fetch_tokenizer(sets.first)
        check_tokenizer_of_weights(sets.first.folder, sets.manifest, folder)
        if sets.manifest.seq_len > published.shape.seq_len:
            raise DataError(
                f"{data} has samples of {sets.manifest.seq_len:,} tokens, and {folder} has positions for "
                f"{published.shape.seq_len:,}. Prepare the data with --seq-len {published.shape.seq_len} or less."
            )

    def load_model() -> GPT:
        from llmscale.evaluate.load_model import load_published_model

        return load_published_model(published)

    no_sets = "" if sets else f"{folder} is a folder of transformers, which names no dataset. Name one with --data SET."
    return Subject(folder, None, published.shape, tokenizer, sets, no_sets, load_record(folder), load_model)
