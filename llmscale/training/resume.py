"""Which checkpoint a run begins with, if any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from llmscale.checkpoint.find import find_checkpoint, read_state
from llmscale.checkpoint.load import find_damage_together, find_newest_good
from llmscale.checkpoint.run_state import RunState, check_identity, parse_run_state
from llmscale.config.run_config import RunConfig
from llmscale.errors import CheckpointError


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint whose files are whole and which belongs to this run."""

    folder: Path
    state: RunState


def find_resume_point(
    config: RunConfig, identity: dict[str, object], group: dist.ProcessGroup, report: Callable[[str], None]
) -> ResumePoint | None:
    """The checkpoint to continue from; None for a run that begins. Collective.

    Raises CheckpointError when the named checkpoint is damaged, when none of a run's checkpoints is whole, or when the
    run that was saved is not this one and the differences were not allowed.
    """
    if config.resume == "none" or config.init_from is not None:
        return None
    folder = (
        find_newest_good(config.run, group, report)
        if config.resume == "auto"
        else (find_named_checkpoint(config.resume, "--resume", group))
    )
    if folder is None:
        return None
    state = parse_run_state(read_state(folder))
    for warning in check_identity(state.identity, identity, config.allow_changed):
        report(f"WARNING: {warning}")
    return ResumePoint(folder, state)


def find_named_checkpoint(path: str | Path, flag: str, group: dist.ProcessGroup) -> Path:
    """The checkpoint that the user named with `flag`, verified. Collective. Raises CheckpointError."""
    folder = find_checkpoint(Path(path))
    damage = find_damage_together(folder, group)
    if damage:
        raise CheckpointError(f"{flag} {path}: {damage} Name another checkpoint.")
    return folder
