"""Where a run begins, decided by all ranks together: confirm the checkpoint, enter its history, load it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
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
    remove_leftovers,
)
from llmscale.checkpoint.load import (
    find_damage_together,
    find_newest_good,
    load_engine,
    load_weights,
    share_descriptions,
)
from llmscale.checkpoint.manifest import CheckpointManifest, History, load_manifest
from llmscale.checkpoint.run_state import SavedRun, read_saved_run
from llmscale.config.hf_model import is_published
from llmscale.engine.collectives import on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.process_group import World
from llmscale.engine.train_step import get_scaler_state, set_scaler_state
from llmscale.errors import CheckpointError
from llmscale.training.rank_agreement import check_same_checkpoint, check_same_weights
from llmscale.training.start import Start

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def confirm_start(start: Start, world: World, report: Callable[[str], None], at: Path | None = None) -> Start:
    """Return the start from a checkpoint that all ranks have verified and see alike. Collective.

    Call it when the run folder is claimed: the newest checkpoint may be another one than `start` found, or damaged.
    `at` is one to go back to in place of what the configuration says. Removes what interrupted saves left.

    Raises CheckpointError if the named checkpoint is damaged, if all checkpoints of the run are, or if it belongs to
    another run; ConfigError if ranks see different ones.
    """
    config, control = start.config, world.control
    is_auto = at is None and config.init_from is None and config.resume == "auto"
    if is_auto:
        share_descriptions(config.run, control, world.disks)
    # Rank 0 reads the folder for all: another rank might read it later and choose another checkpoint.
    found = on_main_rank(control, lambda: find_checkpoints(config.run))
    start = replace(start, found=found)
    chosen = (
        find_newest_good(found, config.run, control, world.disks, report)
        if is_auto
        else _find_named(start, at, world, report)
    )
    start = _begin_at(start, chosen, world, goes_back=at is not None)
    if start.inputs.left_out and at is None:
        report(f"{start.inputs.left_out} has acted at an earlier start of this launch, and is left out")
    for warning in start.warnings:
        report(f"WARNING: {warning}")
    check_same_checkpoint(chosen.path if chosen else None, world)
    if start.weights is not None and at is None:
        check_same_weights(start.weights, world)

    def clean() -> None:
        for line in remove_leftovers(config.run):
            report(line)

    on_each_disk(control, world.disks, clean)
    return start


def _begin_at(start: Start, chosen: Checkpoint | None, world: World, *, goes_back: bool) -> Start:
    """Return the start from a verified checkpoint; `start` itself if it was resolved from this one. Collective."""

    def read() -> SavedRun | None:
        saved = start.source
        # The manifest has the hash of the state that was read.
        if chosen is not None and (saved is None or saved.manifest != chosen.manifest):
            saved = read_saved_run(chosen.path, chosen.manifest)
        saved = saved if chosen else None
        if saved != start.source:
            begin(saved)  # raises what all ranks would raise
        return saved

    def begin(saved: SavedRun | None) -> Start:
        return start.at(saved, resumes=goes_back or start.inputs.resumes)

    # Rank 0 reads it; hashes confirm later that the others see the same files.
    saved = on_main_rank(world.control, read)
    if saved is not None and chosen is not None:
        saved = replace(saved, path=chosen.path)
    return on_all_ranks(world.control, lambda: start if saved == start.source and not goes_back else begin(saved))


def _find_named(start: Start, at: Path | None, world: World, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that the user named, or `at`, verified; None without one. Collective."""
    config = start.config
    flag, path = ("--init-from", config.init_from) if at is None and config.init_from else ("--resume", config.resume)
    path = path if at is None else str(at)
    if path is None or path in ("auto", "none") or is_published(path):
        return None

    def look() -> tuple[str, CheckpointManifest | None]:
        folder = find_checkpoint(Path(path), report)
        try:
            manifest = load_manifest(folder)
        except CheckpointError:
            # Reported below, as all damage.
            manifest = None
        return os.path.relpath(folder, path), manifest

    # Rank 0's answer counts: another rank might see a newer checkpoint of a run that trains.
    inside, manifest = on_main_rank(world.control, look)
    folder = Path(os.path.normpath(Path(path) / inside))
    damage = find_damage_together(folder, world.control, world.disks, manifest)
    if damage or manifest is None:
        raise CheckpointError(f"{flag} {path}: {damage} Name another checkpoint.")
    return Checkpoint(folder, manifest)


def enter_history(start: Start, world: World, report: Callable[[str], None]) -> History:
    """Return the history of this start's checkpoints; a run that goes back permanently begins a new one here.

    Call it when only the first step can still fail. Collective. Raises CheckpointError if the record of a new history
    cannot be written.
    """

    def enter() -> History:
        try:
            # Another disk has its own list; nobody else has written to this one since it was listed.
            found = start.found if start.found and world.disks.is_one else find_checkpoints(start.config.run)
            return _enter(start, found, report)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"the run cannot go back: {error}") from error

    return on_each_disk(world.control, world.disks, enter)


def _enter(start: Start, found: FoundCheckpoints, report: Callable[[str], None]) -> History:
    run, source, state = start.config.run, start.source, start.state
    if source is None or state is None:
        return found.history
    history = history_after(found, source.path, run)
    if history != found.history or not is_of_run(source.path, run) or found.notes:
        _begin_history(run, history, found, source, report)
    try:
        point_best(run, found.under(history).current)
    except (CheckpointError, OSError) as error:
        report(f"WARNING: `best` may not name the best checkpoint: {error}")
    return history


def _begin_history(
    run: Path, history: History, found: FoundCheckpoints, source: Checkpoint, report: Callable[[str], None]
) -> None:
    record_history(run, history, source.path)
    current = {checkpoint.path for checkpoint in found.under(history).current}
    abandoned = [checkpoint for checkpoint in found.current if checkpoint.path not in current]
    if abandoned:
        report(_describe_abandoned(abandoned, history, source, run))
    try:
        point_latest(run, source.path)
    except OSError as error:
        report(f"WARNING: `latest` still points to an abandoned checkpoint: {error}")


def _describe_abandoned(abandoned: list[Checkpoint], history: History, source: Checkpoint, run: Path) -> str:
    """Describe in one line the checkpoints that going back abandons; the newest comes first in the list."""
    gib = sum(checkpoint.manifest.num_bytes for checkpoint in abandoned) / 2**30
    first, last = abandoned[-1].path.name, abandoned[0].path.name
    names = f"{first} to {last}" if len(abandoned) > 1 else last
    return (
        f"history {history.number} of this run begins at step {source.step}. Abandoned: {names} "
        f"({len(abandoned)}, {gib:.2f} GiB), neither resumed nor deleted unless you ask for it: --resume PATH, "
        f"llmscale checkpoint prune {run}"
    )


def load_initial_state(
    start: Start,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> None:
    """Load the checkpoint, or the weights that a new run begins with. Collective. Raises LlmscaleError."""
    source, state = start.source, start.state
    if source is None or state is None:
        name = _load_first_weights(start, engine, world, report, progress)
        if name is not None:
            report(f"weights from {name}; everything else starts at step 0")
        return
    load_checkpoint(engine, source, world, get_scaler_state(engine))
    report(f"continuing from {source.path}: step {state.step}, {state.tokens_seen:,} tokens seen")
    if state.precision != start.resolved.precision:
        report(
            f"precision changes from {state.precision} to {start.resolved.precision}: fp32 master weights and "
            "optimizer states are taken over exactly; a loss scaler, where there is one, starts from its configuration"
        )


def load_checkpoint(
    engine: DeepSpeedEngine, source: SavedRun, world: World, configured_scaler: dict[str, float] | None
) -> None:
    """Load weights, optimizer states and loss scaler; a checkpoint without a scaler resets it to the configured one.

    Collective. Raises CheckpointError.
    """
    load_engine(engine, source.path, source.state, world.control, world.disks)
    set_scaler_state(engine, source.state.loss_scaler or configured_scaler)


def _load_first_weights(
    start: Start,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> str | None:
    """Load the weights of --init-from, and return their name; None without --init-from. Collective."""
    if start.weights is not None:
        for note in start.weights.notes:
            report(note)
        load_published_weights(engine, start.weights, world.control, progress)
        return start.weights.name
    if start.source is None:
        return None
    load_weights(engine, start.source.path, world.control, world.disks)
    return str(start.source.path)
