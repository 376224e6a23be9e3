"""Weights & Biases, only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.bundled_files import install_command
from llmscale.errors import ConfigError
from llmscale.training.trackers.tracker import Tracker, one_line

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


class WandbRun(Tracker):
    """A run of wandb's. It draws nothing at steps below the newest that it has."""

    name = "wandb"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.run_id: str = run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def start_wandb(
    run_folder: Path, *, project: str, name: str, config: Mapping[str, object], run_id: str | None
) -> WandbRun:
    """Begin a wandb run, or continue `run_id`. WANDB_MODE=offline keeps everything in the run folder.

    Raises ConfigError when wandb is not installed, cannot log in or cannot write.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError(f"--wandb needs the wandb package: `{install_command('train')}`.") from None
    try:
        run = wandb.init(
            project=project, name=name, dir=str(run_folder), config=dict(config), id=run_id, resume="allow"
        )
    except (wandb.errors.Error, OSError) as error:
        raise ConfigError(f"--wandb: {one_line(error)} Log in with `wandb login`, or set WANDB_MODE=offline.") from None
    return WandbRun(run)
