"""The run folder: everything that is needed to resume, to explain or to hand over a run. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TextIO

from llmscale import __version__
from llmscale.checkpoint.manifest import write_durably
from llmscale.errors import ConfigError

CONFIG_NAME = "config.json"
DS_CONFIG_NAME = "ds_config.json"
STARTS_NAME = "starts.jsonl"
LOCK_NAME = ".lock"
#: Libraries whose version can change a result.
LIBRARIES = ("torch", "deepspeed", "mosaicml-streaming", "numpy", "tiktoken", "tokenizers")


def create_run_folder(run: Path) -> None:
    """Make the folder, and see that it can be written to. Raises ConfigError."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        probe = run / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--run {run} cannot be written to: {error.strerror or error}. Name a folder on a disk with space and "
            "permission."
        ) from None


def lock_run_folder(run: Path, name: str = LOCK_NAME) -> TextIO:
    """Claim the folder for this process for as long as the returned file stays open; death releases it too.

    A POSIX record lock: forked data workers do not inherit it, and network file systems know it. Raises ConfigError
    when another process holds it: two runs in one folder would overwrite each other's checkpoints.
    """
    file = (run / name).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ConfigError(f"--run {run} is in use by {owner}. Wait for it to end, or name another folder.") from None
    except OSError:
        # A file system without locks: nothing to claim, and no reason not to train.
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on host {platform.node()}\n")
    file.flush()
    return file


def save_run_description(
    run: Path, config: Mapping[str, object], resolved: Mapping[str, object], ds_config: Mapping[str, object]
) -> None:
    """Save the resolved configuration, what DeepSpeed really got, and one line about this start. Main rank only."""
    _write_json(run / CONFIG_NAME, {"config": config, "resolved": resolved})
    _write_json(run / DS_CONFIG_NAME, ds_config)
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "world_size": resolved.get("plan", {}).get("world_size"),  # type: ignore[attr-defined]  # a dict by as_dict
        "python": platform.python_version(),
        "llmscale": __version__,
        "versions": {name: _version(name) for name in LIBRARIES},
    }
    with (run / STARTS_NAME).open("a") as file:
        file.write(json.dumps(start) + "\n")


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    write_durably(path, json.dumps(values, indent=1) + "\n")


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
