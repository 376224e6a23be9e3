"""Weights & Biases, only when asked for, only on the main rank; what goes wrong with it does not end training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.errors import ConfigError
from llmscale.files.append import warn_on_stderr

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


class WandbLog:
    """A wandb run that may fail at any time: its service dies, its disk fills, its server is gone."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._missing: list[int] = []

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Values of a step; a warning when they begin, and when they cease, not to arrive."""
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # whatever wandb and its service can raise
            if not self._missing:
                warn_on_stderr(f"WARNING: wandb failed at step {step}: {_one_line(error)}. Training goes on.")
            self._missing.append(step)
            return
        if self._missing:
            warn_on_stderr(f"WARNING: wandb works again. {self._lacks()}")
            self._missing.clear()

    def finish(self) -> None:
        """Hand over what is left."""
        try:
            self._run.finish()
        except Exception as error:  # as above
            warn_on_stderr(f"WARNING: wandb could not finish: {_one_line(error)}.")
        if self._missing:
            warn_on_stderr(f"WARNING: {self._lacks()}")

    def _lacks(self) -> str:
        first, last = self._missing[0], self._missing[-1]
        return f"It lacks {len(self._missing)} records of steps {first} to {last}; metrics.jsonl has what was measured."


def start_wandb(run_folder: Path, *, project: str, name: str, config: Mapping[str, object], run_id: str | None) -> Run:
    """Begin a wandb run, or continue `run_id`. WANDB_MODE=offline keeps everything in the run folder.

    Raises ConfigError when wandb is not installed, cannot log in or cannot write.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb needs the wandb package: pip install 'llmscale[train]'.") from None
    try:
        return wandb.init(
            project=project, name=name, dir=str(run_folder), config=dict(config), id=run_id, resume="allow"
        )
    except (wandb.errors.Error, OSError) as error:
        raise ConfigError(
            f"--wandb: {_one_line(error)} Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
