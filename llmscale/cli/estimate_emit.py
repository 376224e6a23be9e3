"""The recommended row as a ds_config file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llmscale.checkpoint.manifest import write_durably
from llmscale.config.ds_schema import parse_ds_config
from llmscale.errors import ConfigError
from llmscale.memory.search import Fit
from llmscale.memory.strategy import strategy_ds_config


def check_emit(path: Path, *, force: bool) -> None:
    """Refuse, before anything is computed, what could not be written. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"--emit {path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--emit {path}: the folder {path.parent} does not exist.")
    if path.exists() and not force:
        raise ConfigError(f"--emit {path} exists already. Name another file, or overwrite it with --force.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--emit {path}: the folder {path.parent} may not be written to.")


def emit_ds_config(path: Path, fit: Fit, nvme_path: str) -> None:
    """Write the file, all of it or nothing. Raises ConfigError."""
    config = strategy_ds_config(fit.strategy, fit.layout.precision, nvme_path)
    parse_ds_config(config, str(path))
    try:
        write_durably(path, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--emit {path} cannot be written: {error.strerror or error}.") from None
