"""What a run keeps of the published model that it was made from, so that exports say what the model's folder said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.hf_folder import CONFIG_NAME, GENERATION_NAME
from llmscale.config.hf_model import PREFIX, PublishedModel, read_published_model
from llmscale.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: Folder of a run.
PUBLISHED_NAME = "published"
#: Rows of the position table after the run's own, and the parameter that they belong to.
POSITIONS_NAME, POSITIONS = "positions.safetensors", "wpe.weight"


def open_published(run: Path) -> PublishedModel | None:
    """Return the model that a run folder keeps the description of, or None. Raises ConfigError."""
    folder = run / PUBLISHED_NAME
    # Whoever packed the run could make an export, or another run, contain any file of this machine.
    for path in (folder, *(folder / name for name in (CONFIG_NAME, GENERATION_NAME, POSITIONS_NAME))):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link. Put what it leads to in its place.")
    return read_published_model("the run's", f"{PREFIX}{folder}") if (folder / CONFIG_NAME).is_file() else None


def last_positions(model: PublishedModel, first: int) -> Tensor | None:
    """Return the published positions from row `first` on, [rows, n_embd]; None where the run kept none. Raises
    CheckpointError."""
    path = (model.folder or Path()) / POSITIONS_NAME
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        rows = load_file(path)[POSITIONS].float()
    except (SafetensorError, OSError, KeyError):
        rows = None
    if rows is None or rows.shape != (model.shape.seq_len - first, model.shape.n_embd):
        raise CheckpointError(f"{path} is damaged: it does not hold the model's positions after the first {first:,}.")
    return rows
