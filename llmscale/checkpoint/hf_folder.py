"""Where a Hugging Face model may be written. No torch."""

from __future__ import annotations

from pathlib import Path

from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.errors import ConfigError

WEIGHTS_NAME = "model.safetensors"
#: What `llmscale export` writes, and the only names that --overwrite deletes.
_NAMES = ("config.json", WEIGHTS_NAME, "tokenizer.json", "tokenizer_config.json")


def check_hf_folder(out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    """Refuse, before anything is loaded, a folder that may not be written. Raises ConfigError."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out {out} is {'a link' if out.is_symlink() else 'no folder'}. Name a folder.")
    try:
        place = out.resolve()
        names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other, before Python 3.13
        raise ConfigError(f"--out {out} cannot be read: {error}. Name another folder.") from None
    checkpoint = checkpoint.resolve()
    guarded = checkpoint.parent if checkpoint.parent.name == CHECKPOINTS_NAME else checkpoint
    if place.is_relative_to(guarded):
        raise ConfigError(f"--out {out} lies in {guarded}, where only training writes. Name a folder outside it.")
    if Path.cwd().is_relative_to(place):
        raise ConfigError(f"--out {out} is the folder that this runs in, and cannot be replaced. Name another one.")
    foreign = [name for name in names if name not in _NAMES]
    if foreign:
        raise ConfigError(
            f"--out {out} holds '{foreign[0]}', which no export wrote, so it will not be replaced. Name another folder."
        )
    if names and not overwrite:
        raise ConfigError(f"--out {out} exists already. Name another folder, or replace it with --overwrite.")
