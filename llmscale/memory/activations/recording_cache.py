"""Recordings of blocks that no table has, made on this machine and kept in the user's cache folder. No torch.

They hold for the code and the libraries that they were made with: each such combination has a folder of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmscale import __version__
from llmscale.errors import ConfigError
from llmscale.files.atomic_write import write_durably
from llmscale.files.source_hashes import source_hashes

#: Packages of llmscale that decide what a recording holds, beside torch and DeepSpeed.
_RECORDED_FROM = ("architecture", "model", "engine", "dry_run", "memory/activations")


def recording_path(table: str, branch: str) -> Path | None:
    """Where the recording of one branch is or would be kept; None without torch or DeepSpeed, which would make it."""
    name = _versions()
    return None if name is None else cache_folder() / name / f"{table}--{branch.replace(' ', '_')}.json"


def read_recording(table: str, branch: str) -> str | None:
    """JSON text as it was written; None where there is none."""
    path = recording_path(table, branch)
    try:
        return None if path is None else path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def write_recordings(texts: Mapping[tuple[str, str], str]) -> None:
    """JSON texts by table and branch, each of which is there whole or not at all. Raises ConfigError."""
    for (table, branch), text in texts.items():
        path = recording_path(table, branch)
        assert path is not None, "torch has just recorded it"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text)
        except OSError as error:
            raise ConfigError(
                f"{path.parent} cannot be written, where recorded blocks are kept: {error.strerror or error}. Set "
                "XDG_CACHE_HOME to a folder that can."
            ) from None


def cache_folder() -> Path:
    """For recordings of all versions."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmscale" / "recorded"


@cache
def _versions() -> str | None:
    """What a recording holds for."""
    try:
        libraries = [f"{name}-{version(name)}" for name in ("torch", "deepspeed")]
    except PackageNotFoundError:
        return None
    package = Path(__file__).parents[2]
    hashes = [source_hashes(package / folder) for folder in _RECORDED_FROM]
    digest = hashlib.sha256(repr(hashes).encode()).hexdigest()
    return "_".join((f"llmscale-{__version__}-{digest[:12]}", *libraries))
