"""The checkpoint that a run begins with, if any: find it, enter its history, load it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.commit import point_latest
from llmscale.checkpoint.initial_weights import load_published_weights
from llmscale.checkpoint.inventory import (
    Checkpoint,
    FoundCheckpoints,
    find_checkpoint,
    find_checkpoints,
    history_after,
    is_of_run,
    point_best,
    record_history,
)
from llmscale.checkpoint.load import find_damage_together, find_newest_good, load_engine, load_weights
from llmscale.checkpoint.manifest import History, load_manifest
from llmscale.checkpoint.run_state import RunState, check_identity, load_run_state
from llmscale.config.run_config import RunConfig
from llmscale.engine.collectives import on_each_disk, on_main_rank
from llmscale.engine.process_group import World
from llmscale.engine.train_step import get_scaler_state, set_scaler_state
from llmscale.errors import CheckpointError
from llmscale.training.prepare_run import PreparedRun

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint that belongs to this run."""

    folder: Path
    state: RunState


def find_resume_point(
    config: RunConfig,
    identity: Callable[[RunState], Mapping[str, object]],
    world: World,
    report: Callable[[str], None],
) -> ResumePoint | None:
    """Return the checkpoint to resume; None for a new run. Collective.

    `identity` returns this run's identity when it resumes a checkpoint, whose order of samples it keeps. Raises
    CheckpointError if the named checkpoint is damaged, if all checkpoints of the run are, or if it belongs to another
    run and the differences were not allowed.
    """
    if config.resume == "none" or config.init_from is not None:
        return None
    folder = (
        find_newest_good(config.run, world.control, world.disks, report)
        if config.resume == "auto"
        else _find_named_checkpoint(config.resume, "--resume", world, report)
    )
    if folder is None:
        return None
    # Rank 0 reads it; hashes confirm later that the others see the same files.
    point = on_main_rank(world.control, lambda: _check_point(folder, config, identity, report))
    return replace(point, folder=folder)


def _check_point(
    folder: Path,
    config: RunConfig,
    identity: Callable[[RunState], Mapping[str, object]],
    report: Callable[[str], None],
) -> ResumePoint:
    """Return the checkpoint in `folder`. Raises CheckpointError if it belongs to another run."""
    state = load_run_state(folder)
    if state.step != load_manifest(folder).step:
        raise CheckpointError(
            f"{folder} says step {load_manifest(folder).step} in one file and {state.step} in another."
        )
    for warning in check_identity(state.identity, identity(state), config.allow_changed):
        report(f"WARNING: {warning}")
    return ResumePoint(folder, state)


def _find_named_checkpoint(path: str | Path, flag: str, world: World, report: Callable[[str], None]) -> Path:
    """Return the checkpoint that the user named with `flag`, verified. Collective. Raises CheckpointError."""
    # Rank 0's answer counts: another rank might see a newer checkpoint of a run that trains.
    inside = on_main_rank(world.control, lambda: os.path.relpath(find_checkpoint(Path(path), report), path))
    folder = Path(os.path.normpath(Path(path) / inside))
    damage = find_damage_together(folder, world.control, world.disks)
    if damage:
        raise CheckpointError(f"{flag} {path}: {damage} Name another checkpoint.")
    return folder


def enter_history(run: Path, point: ResumePoint | None, world: World, report: Callable[[str], None]) -> History:
    """Return the history of this start's checkpoints; a run that goes back permanently begins a new one here.

    Call it when only the first step can still fail. Collective. Raises CheckpointError if the record of a new history
    cannot be written.
    """

    def enter() -> History:
        try:
            return _enter(run, point, report)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"the run cannot go back: {error}") from error

    return on_each_disk(world.control, world.disks, enter)


def _enter(run: Path, point: ResumePoint | None, report: Callable[[str], None]) -> History:
    found = find_checkpoints(run)
    if point is None:
        return found.history
    history = history_after(found, point.folder, run)
    if history != found.history or not is_of_run(point.folder, run) or found.notes:
        _begin_history(run, history, found, point, report)
    try:
        point_best(run, find_checkpoints(run, history).current)
    except (CheckpointError, OSError) as error:
        report(f"WARNING: `best` may not name the best checkpoint: {error}")
    return history


def _begin_history(
    run: Path, history: History, found: FoundCheckpoints, point: ResumePoint, report: Callable[[str], None]
) -> None:
    record_history(run, history, point.folder)
    current = {checkpoint.path for checkpoint in find_checkpoints(run).current}
    abandoned = [checkpoint for checkpoint in found.current if checkpoint.path not in current]
    if abandoned:
        report(_describe_abandoned(abandoned, history, point, run))
    try:
        point_latest(run, point.folder)
    except OSError as error:
        report(f"WARNING: `latest` still points to an abandoned checkpoint: {error}")


def _describe_abandoned(abandoned: list[Checkpoint], history: History, point: ResumePoint, run: Path) -> str:
    """Describe in one line the checkpoints that going back abandons; the newest comes first in the list."""
    gib = sum(checkpoint.manifest.num_bytes for checkpoint in abandoned) / 2**30
    first, last = abandoned[-1].path.name, abandoned[0].path.name
    names = f"{first} to {last}" if len(abandoned) > 1 else last
    return (
        f"history {history.number} of this run begins at step {point.state.step}. Abandoned: {names} "
        f"({len(abandoned)}, {gib:.2f} GiB), neither resumed nor deleted unless you ask for it: --resume PATH, "
        f"llmscale checkpoint prune {run}"
    )


def load_initial_state(
    run: PreparedRun,
    engine: DeepSpeedEngine,
    point: ResumePoint | None,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> None:
    """Load the checkpoint, or the weights that a new run begins with. Collective. Raises LlmscaleError."""
    if point is None:
        name = _load_first_weights(run, engine, world, report, progress)
        if name is not None:
            report(f"weights from {name}; everything else starts at step 0")
        return
    load_checkpoint(engine, point, world, get_scaler_state(engine))
    report(f"continuing from {point.folder}: step {point.state.step}, {point.state.tokens_seen:,} tokens seen")
    if point.state.precision != run.resolved.precision:
        report(
            f"precision changes from {point.state.precision} to {run.resolved.precision}: fp32 master weights and "
            "optimizer states are taken over exactly; a loss scaler, where there is one, starts from its configuration"
        )


def load_checkpoint(
    engine: DeepSpeedEngine, point: ResumePoint, world: World, configured_scaler: dict[str, float] | None
) -> None:
    """Load weights, optimizer states and loss scaler; a checkpoint without a scaler resets it to the configured one.

    Collective. Raises CheckpointError.
    """
    load_engine(engine, point.folder, point.state, world.control, world.disks)
    set_scaler_state(engine, point.state.loss_scaler or configured_scaler)


def _load_first_weights(
    run: PreparedRun,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> str | None:
    """Load the weights of --init-from, and return their name; None without --init-from. Collective."""
    if run.weights is not None:
        for note in run.weights.notes:
            report(note)
        load_published_weights(engine, run.weights, world.control, progress)
        return run.weights.name
    if run.config.init_from is None:
        return None
    folder = _find_named_checkpoint(run.config.init_from, "--init-from", world, report)
    load_weights(engine, folder, world.control, world.disks)
    return str(folder)
