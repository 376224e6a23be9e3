"""Which checkpoint a run begins with, if any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from llmscale.checkpoint.commit import point_latest
from llmscale.checkpoint.inventory import (
    Checkpoint,
    find_checkpoint,
    find_checkpoints,
    history_after,
    is_of_run,
    read_state,
    record_history,
)
from llmscale.checkpoint.load import find_damage_together, find_newest_good
from llmscale.checkpoint.manifest import History, load_manifest
from llmscale.checkpoint.run_state import RunState, check_identity, parse_run_state
from llmscale.config.run_config import RunConfig
from llmscale.engine.collectives import on_main_rank
from llmscale.errors import CheckpointError


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint whose files are whole and which belongs to this run."""

    folder: Path
    state: RunState


def find_resume_point(
    config: RunConfig,
    identity: Callable[[RunState], Mapping[str, object]],
    group: dist.ProcessGroup,
    report: Callable[[str], None],
) -> ResumePoint | None:
    """The checkpoint to continue from; None for a run that begins. Collective.

    `identity` gives this run's identity when it goes on from a checkpoint, whose order of samples it keeps.
    Raises CheckpointError when the named checkpoint is damaged, when none of a run's checkpoints is whole, or when the
    run that was saved is not this one and the differences were not allowed.
    """
    if config.resume == "none" or config.init_from is not None:
        return None
    folder = (
        find_newest_good(config.run, group, report)
        if config.resume == "auto"
        else (find_named_checkpoint(config.resume, "--resume", group, report))
    )
    if folder is None:
        return None
    # The main rank's reading counts here too; that the others see the same files is compared by what they hash to.
    return on_main_rank(group, lambda: _check_point(folder, config, identity, report))


def _check_point(
    folder: Path,
    config: RunConfig,
    identity: Callable[[RunState], Mapping[str, object]],
    report: Callable[[str], None],
) -> ResumePoint:
    """The checkpoint in `folder`, when it belongs to this run. Raises CheckpointError."""
    state = parse_run_state(read_state(folder))
    if state.step != load_manifest(folder).step:
        raise CheckpointError(
            f"{folder} says step {load_manifest(folder).step} in one file and {state.step} in another."
        )
    for warning in check_identity(state.identity, identity(state), config.allow_changed):
        report(f"WARNING: {warning}")
    return ResumePoint(folder, state)


def find_named_checkpoint(path: str | Path, flag: str, group: dist.ProcessGroup, report: Callable[[str], None]) -> Path:
    """The checkpoint that the user named with `flag`, verified. Collective. Raises CheckpointError."""
    # The main rank's answer counts: of a run that is training, another rank might see a newer one.
    folder = on_main_rank(group, lambda: find_checkpoint(Path(path), report))
    damage = find_damage_together(folder, group)
    if damage:
        raise CheckpointError(f"{flag} {path}: {damage} Name another checkpoint.")
    return folder


def enter_history(
    run: Path, point: ResumePoint | None, group: dist.ProcessGroup, report: Callable[[str], None]
) -> History:
    """The history that this start's checkpoints belong to; a run that goes back begins a new one here, for good.

    Call it when nothing but the first step can fail any more. Collective. Raises CheckpointError when the record of a
    new history cannot be written.
    """

    def enter() -> History:
        try:
            return _enter(run, point, report)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"the run cannot go back: {error}") from error

    return on_main_rank(group, enter)


def _enter(run: Path, point: ResumePoint | None, report: Callable[[str], None]) -> History:
    found = find_checkpoints(run)
    if point is None:
        return found.history
    history = history_after(found, point.folder, run)
    if history == found.history and is_of_run(point.folder, run) and not found.notes:
        return history
    record_history(run, history, point.folder)
    still = {checkpoint.path for checkpoint in find_checkpoints(run).current}
    left = [checkpoint for checkpoint in found.current if checkpoint.path not in still]
    if left:
        report(_describe_abandoned(left, history, point, run))
    try:
        point_latest(run, point.folder)
    except OSError as error:
        report(f"WARNING: `latest` still points to what is abandoned now: {error}")
    return history


def _describe_abandoned(left: list[Checkpoint], history: History, point: ResumePoint, run: Path) -> str:
    """What the user who goes back should know, in one line. `left`: the newest first."""
    gib = sum(checkpoint.manifest.num_bytes for checkpoint in left) / 2**30
    names = f"{left[-1].path.name} to {left[0].path.name}" if len(left) > 1 else left[0].path.name
    return (
        f"history {history.number} of this run begins at step {point.state.step}. Abandoned: {names} ({len(left)}, "
        f"{gib:.2f} GiB), neither resumed nor deleted unless you say so: --resume PATH, llmscale checkpoint prune {run}"
    )
