"""The recommended row as a ds_config file, and the train.py command that goes with it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from llmscale.checkpoint.manifest import write_durably
from llmscale.cli.estimate_request import Request
from llmscale.config.ds_schema import parse_ds_config
from llmscale.errors import ConfigError
from llmscale.memory.search import Fit
from llmscale.memory.strategy import strategy_ds_config

#: Keys of the model that train.py must be told again; the vocabulary and the context are the data set's.
_MODEL_KEYS = ("model", "n_layer", "n_head", "n_embd", "activation", "dropout", "bias")


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


def train_command(path: Path, fit: Fit, request: Request) -> str:
    """What runs the row."""
    machines = fit.machines
    words = ["deepspeed"]
    words += ["--hostfile", "HOSTFILE"] if machines.num_nodes > 1 else ["--num_gpus", str(machines.gpus_per_node)]
    words += ["llmscale/train.py", "--ds", str(path)]
    for key in _MODEL_KEYS:
        if key in request.config.model_fields_set:
            words += _flag(key, getattr(request.config, key))
    words += _flag("global_batch_size", fit.plan.global_batch_size)
    words += _flag("micro_batch_size", fit.plan.micro_batch_size)
    if request.config.precision is not None:
        words += _flag("precision", request.config.precision)
    # What the file does not say by itself: DeepSpeed has a section that means `full`, and none for `selective`.
    if fit.strategy.checkpointing != ("full" if fit.ds.activation_checkpointing else "none"):
        words += _flag("activation_checkpointing", fit.strategy.checkpointing)
    return shlex.join(words)


def _flag(key: str, value: object) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]
