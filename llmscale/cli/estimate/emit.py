"""The recommended row as a ds_config file."""

from __future__ import annotations

import json
from pathlib import Path

from llmscale.config.deepspeed.schema import parse_ds_config
from llmscale.errors import ConfigError
from llmscale.files.whole import write_output
from llmscale.planning.largest_micro_batch import Fit
from llmscale.planning.strategy import strategy_ds_config


def emit_ds_config(path: Path, fit: Fit, nvme_path: str) -> None:
    """Write the file, all of it or nothing. Raises ConfigError."""
    config = strategy_ds_config(fit.strategy, fit.layout.precision, nvme_path)
    parse_ds_config(config, str(path))
    try:
        write_output(path, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--emit {path} cannot be written: {error.strerror or error}.") from None
