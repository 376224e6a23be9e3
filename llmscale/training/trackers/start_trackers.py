"""The trackers that a run asked for. A new one is a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmscale.config.run_config import RunConfig
from llmscale.training.trackers.tensorboard_files import start_tensorboard
from llmscale.training.trackers.tracker import PatientTracker, Tracker
from llmscale.training.trackers.wandb_run import start_wandb


@dataclass(frozen=True)
class StartedTrackers:
    """Of one start, on the main rank."""

    trackers: tuple[Tracker, ...] = ()
    wandb_run_id: str | None = None
    """None without --wandb."""


def start_trackers(
    config: RunConfig, described: Callable[[], Mapping[str, object]], *, first_step: int, wandb_run_id: str | None
) -> StartedTrackers:
    """Begin them, or go on after `first_step` steps with the curves of an earlier start. `described` is the run as
    plain values. Raises ConfigError."""
    found: list[Tracker] = []
    if config.tensorboard:
        found.append(start_tensorboard(config.run, first_step=first_step))
    if config.wandb:
        run = start_wandb(
            config.run,
            project=config.wandb_project,
            name=config.wandb_name or config.run.name,
            config=described(),
            run_id=wandb_run_id,
        )
        found.append(run)
        wandb_run_id = run.run_id
    return StartedTrackers(tuple(PatientTracker(tracker) for tracker in found), wandb_run_id if config.wandb else None)
