"""Decide with all ranks where a run begins: confirm the checkpoint, enter its history, load it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.layers import is_adapter
from llmscale.checkpoint.initial_weights import (
    FrozenBase,
    base_of_checkpoint,
    check_base,
    checksum_of,
    fingerprint_weights,
    load_published_weights,
)
from llmscale.checkpoint.load import load_engine, load_weights
from llmscale.checkpoint.manifest import MANIFEST_NAME, Checkpoint, History
from llmscale.checkpoint.peft_files import load_adapters
from llmscale.checkpoint.run_state import SavedRun, read_saved_run
from llmscale.checkpoint.store import CheckpointStore
from llmscale.config.hf_model import is_published
from llmscale.engine.collectives import on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.loss_scale import get_scaler_state, set_scaler_state
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError
from llmscale.training.inputs import open_named
from llmscale.training.rank_agreement import compare_ranks
from llmscale.training.run_folder import hash_or_reason
from llmscale.training.start import Start

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Flags for a run folder without a checkpoint to continue from.
_HOW_TO_BEGIN = " --resume PATH names one, --run another folder, and --resume none begins at step 0."


def confirm_start(start: Start, world: World, report: Callable[[str], None], at: Path | None = None) -> Start:
    """Return the start from a checkpoint that all ranks have verified and see alike. Collective.

    Call it when the run folder is claimed: the newest checkpoint may be another one than `start` found, or damaged.
    `at` is one to go back to in place of what the configuration says. Removes what interrupted saves left.

    Raises CheckpointError if the named checkpoint is damaged, if all checkpoints of the run are, or if it belongs to
    another run; ConfigError if ranks see different ones.
    """
    config = start.config
    control = world.control
    is_auto = at is None and config.init_from is None and config.resume == "auto"
    store = CheckpointStore(config.run, control, world.disks, report)
    if is_auto:
        store.share()
    listing = store.list()
    start = replace(start, listing=listing)
    if is_auto:
        chosen = store.newest_whole(listing, hint=_HOW_TO_BEGIN)
    else:
        chosen = _find_named(start, at, store, report)
    resumes = at is not None or start.resumes

    def read() -> SavedRun | None:
        source = start.source
        if chosen is None or source is None or source.manifest != chosen.manifest:
            if chosen:
                source = read_saved_run(chosen)
            else:
                source = None
        start.at(source, resumes=resumes)  # raises what all ranks would raise
        return source

    # Rank 0 reads it; hashes confirm later that the others see the same files.
    source = on_main_rank(control, read)
    if source is not None and chosen is not None:
        source = replace(source, path=chosen.path)
    start = start.at(source, resumes=resumes)
    if start.left_out and at is None:
        report(f"{start.left_out} has acted at an earlier start of this launch, and is left out")
    for warning in start.warnings:
        report(f"WARNING: {warning}")
    same = {"name": "none", MANIFEST_NAME: "none"}
    if chosen is not None:
        same = {"name": chosen.path.name, MANIFEST_NAME: hash_or_reason(chosen.path / MANIFEST_NAME)}
    compare_ranks({"checkpoint": same}, control)
    if (weights := start.weights) is not None and at is None:
        compare_ranks({"weights": on_all_ranks(control, lambda: fingerprint_weights(weights))}, control)
    if start.base is not None and at is None:
        start = replace(start, base=_confirm_base(start, start.base, store))
    store.remove_leftovers()
    return start


def _confirm_base(start: Start, base: FrozenBase, store: CheckpointStore) -> FrozenBase:
    """Return the weights beside adapters with their checksum, which is the checkpoint's. Collective.

    Raises CheckpointError if they are damaged, or others.
    """
    if start.source is not None and not start.resumes:
        base = base_of_checkpoint(start.source)  # a run that trains may have a newer one by now
    elif base.source and (damage := store.find_damage(base.source)):
        raise CheckpointError(damage)
    files = start.weights.files if start.weights else ()
    base = replace(base, checksum=on_each_disk(store.group, store.disks, checksum_of, base, files))
    if start.source is not None and start.state is not None:
        check_base(base, start.source)
    return base


def _find_named(
    start: Start, at: Path | None, store: CheckpointStore, report: Callable[[str], None]
) -> Checkpoint | None:
    """Return the checkpoint that the user named, or `at`, verified; None without one. Collective."""
    config = start.config
    flag, path = ("--init-from", config.init_from) if at is None and config.init_from else ("--resume", config.resume)
    if at is not None:
        path = str(at)
    if path is None or path in ("auto", "none") or is_published(path):
        return None

    def look() -> tuple[str, Checkpoint]:
        checkpoint = open_named(flag, path, report)
        return os.path.relpath(checkpoint.path, path), checkpoint

    # Rank 0's answer counts: another rank might see a newer checkpoint of a run that trains.
    inside, checkpoint = on_main_rank(store.group, look)
    checkpoint = replace(checkpoint, path=Path(os.path.normpath(Path(path) / inside)))
    if damage := store.find_damage(checkpoint):
        raise CheckpointError(f"{flag} {path}: {damage} Name another checkpoint.")
    return checkpoint


def enter_history(start: Start, world: World, report: Callable[[str], None]) -> History:
    """Return the history of this start's checkpoints; see CheckpointStore.enter_history. Collective."""
    run = start.config.run
    store = CheckpointStore(run, world.control, world.disks, report)
    source = None if start.state is None else start.source
    return store.enter_history(source, start.listing, hint=f": --resume PATH, llmscale checkpoint prune {run}")


def load_initial_state(
    start: Start,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> None:
    """Load the checkpoint, or the weights that a new run begins with. Collective. Raises LlmscaleError."""
    source = start.source
    state = start.state
    if source is None or state is None:
        name = _load_first_weights(start, engine, world, report, progress)
        if name is not None:
            report(f"weights from {name}; everything else starts at step 0")
        return
    if start.base is not None:
        _load_base(start, start.base, engine, world, progress)
    cast = load_checkpoint(engine, source, world, get_scaler_state(engine))
    report(f"continuing from {source.path}: step {state.step}, {state.tokens_seen:,} tokens seen")
    if state.precision != start.resolved.precision:
        report(
            f"precision changes from {state.precision} to {start.resolved.precision}: "
            f"{cast or 'fp32 master weights and optimizer states are taken over exactly'}; a loss scaler, where there "
            "is one, starts from its configuration"
        )
    elif cast:
        report(cast)


def _load_base(
    start: Start, base: FrozenBase, engine: DeepSpeedEngine, world: World, progress: Callable[[], object]
) -> None:
    """Load the weights beside a checkpoint's adapters. Collective. Raises CheckpointError."""
    if base.source is not None:
        load_weights(engine, base.source.path, world.control, world.disks, keeps=is_adapter)
    elif start.weights is not None:
        load_published_weights(engine, start.weights, world.control, progress)


def load_checkpoint(
    engine: DeepSpeedEngine, source: SavedRun, world: World, configured_scaler: dict[str, float] | None
) -> str | None:
    """Load weights, optimizer states and loss scaler; a checkpoint without a scaler resets it to the configured one.

    Collective. Returns a line about states of another type, or None. Raises CheckpointError.
    """
    state = source.state
    cast = load_engine(
        engine,
        source.path,
        state.optimizer_scalars,
        world.control,
        world.disks,
        with_frozen=not state.base,
    )
    engine.global_steps = state.step
    set_scaler_state(engine, source.state.loss_scaler or configured_scaler)
    return cast


def _load_first_weights(
    start: Start,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> str | None:
    """Load the weights of --init-from, and return their name; None without --init-from. Collective."""
    name = None
    if start.weights is not None:
        for note in start.weights.notes:
            report(note)
        load_published_weights(engine, start.weights, world.control, progress)
        name = start.weights.name
    elif start.source is not None:
        load_weights(engine, start.source.path, world.control, world.disks, keeps=is_adapter)
        name = str(start.source.path)
    if (folder := start.config.lora_from) is not None:
        load_adapters(engine, folder, start.weights.model if start.weights else None, world.control)
        name = f"{name}, adapters from {folder}"
    return name
