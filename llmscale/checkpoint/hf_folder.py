"""Where a Hugging Face model may be written. No torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.config.user_paths import check_output_folder
from llmscale.data.prepare.output_folder import find_writer
from llmscale.errors import ConfigError, DataError
from llmscale.untrusted.paths import read_regular

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
CARD_NAME = "README.md"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: What `llmscale export` writes, tokenizers' files included, and the only names that --overwrite deletes.
_NAMES = (
    *(CONFIG_NAME, GENERATION_NAME, CARD_NAME, WEIGHTS_NAME, INDEX_NAME),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model"),
)
#: A line of every exported model card.
CARD_MARK = "- llmscale"
_CARD_BYTES = 1 << 20
_SHARD_NAME = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
#: Space beyond the weights that an export asks for: a large vocabulary's tokenizer.json, and the file system's own.
_SPARE_BYTES = 32 * 2**20


def shard_name(number: int, total: int) -> str:
    """Of one of several files of weights, numbered from 1."""
    return f"model-{number:05}-of-{total:05}.safetensors"


def check_hf_folder(out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    """Refuse, before anything is loaded, a folder that may not be written. Raises ConfigError."""
    check_output_folder("--to", out)
    if out.is_symlink():
        raise ConfigError(f"--to {out} is a link. Name a folder.")
    try:
        place = out.resolve()
        names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other, before Python 3.13
        raise ConfigError(f"--to {out} cannot be read: {error}. Name another folder.") from None
    checkpoint = checkpoint.resolve()
    guarded = checkpoint.parent if checkpoint.parent.name == CHECKPOINTS_NAME else checkpoint
    if place.is_relative_to(guarded):
        raise ConfigError(f"--to {out} lies in {guarded}, where only training writes. Name a folder outside it.")
    if Path.cwd().is_relative_to(place):
        raise ConfigError(f"--to {out} is the folder that this runs in, and cannot be replaced. Name another one.")
    writer = find_writer(out)
    if writer is not None:
        raise ConfigError(
            f"--to {out} is being written: another process is at {writer}. Wait for it to end, or name another folder."
        )
    # Every export has a configuration: a README.md alone is somebody's project.
    foreign = [name for name in names if not _is_ours(name) or CONFIG_NAME not in names]
    if foreign:
        raise ConfigError(
            f"--to {out} holds '{foreign[0]}', which no export wrote, so it will not be replaced. Name another folder."
        )
    if names and not _is_marked(out / CARD_NAME):
        raise ConfigError(
            f"--to {out} holds a model that no export wrote ({CARD_NAME} does not say llmscale), so it will not be "
            "replaced. Name another folder."
        )
    if names and not overwrite:
        raise ConfigError(f"--to {out} exists already. Name another folder, or replace it with --overwrite.")


def _is_marked(card: Path) -> bool:
    """Whether a model card has the tag that every export gives it."""
    try:
        return CARD_MARK in read_regular(card, _CARD_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return False


def _is_ours(name: str) -> bool:
    return name in _NAMES or _SHARD_NAME.fullmatch(name) is not None


def check_space(out: Path, weight_bytes: int) -> None:
    """Refuse a disk that has no room for weights of so many bytes. Raises DataError."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    needed, free = weight_bytes + _SPARE_BYTES, shutil.disk_usage(place).free
    if free < needed:
        raise DataError(
            f"Cannot write {out}: {needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free. Free some "
            "space, name a folder on another disk, or a smaller --dtype."
        )
