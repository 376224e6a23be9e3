"""Weights & Biases, only when asked for, only on the main rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


def start_wandb(run_folder: Path, *, project: str, name: str, config: Mapping[str, object], run_id: str | None) -> Run:
    """Begin a wandb run, or continue `run_id`. WANDB_MODE=offline keeps everything in the run folder.

    Raises ConfigError when wandb is not installed or cannot log in.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb needs the wandb package: pip install 'llmscale[train]'.") from None
    try:
        return wandb.init(
            project=project, name=name, dir=str(run_folder), config=dict(config), id=run_id, resume="allow"
        )
    except wandb.errors.Error as error:
        raise ConfigError(
            f"--wandb: {' '.join(str(error).split())} Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from None
