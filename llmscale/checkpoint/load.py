"""Load a checkpoint into an engine of any ZeRO stage, world size and precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llmscale.checkpoint.inventory import explain_no_checkpoint, find_checkpoints, report_passed_over
from llmscale.checkpoint.manifest import MANIFEST_NAME, checkpoints_folder, find_damage
from llmscale.checkpoint.remote_run import fetch_chunks
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.separate_disks import find_missing, share_descriptions, share_files
from llmscale.checkpoint.tensor_files import (
    DTYPES,
    INDEX_NAME,
    Fragment,
    FragmentLoadPlanner,
    JsonIndexReader,
    engine_fragments,
    load_index,
    stored_chunks,
)
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_main_rank
from llmscale.engine.zero_shards import (
    MASTER,
    group_scalars,
    materialise_optimizer_state,
    refresh_low_precision_weights,
    set_group_scalars,
    write_back,
)
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


#: Prefixes of the model's tensors, without the optimizer's.
_WEIGHTS = (f"{MASTER}/", "frozen/", "buffer/")


def find_newest_good(run: Path, group: dist.ProcessGroup, disks: Disks, report: Callable[[str], None]) -> Path | None:
    """Find the newest undamaged checkpoint of a run's current history; None when the run has no checkpoints.

    Collective: the ranks share the hashing. `report` gets a line for every skipped entry. Raises CheckpointError when
    no checkpoint is undamaged: only the user may decide to start from scratch.
    """
    share_descriptions(run, group, disks)
    # Rank 0 reads the folder for all: another rank might read it later and choose another checkpoint.
    found = on_main_rank(group, lambda: find_checkpoints(run))
    report_passed_over(found, report)
    for folder, damage in found.damaged:
        report(f"WARNING: {folder.name} is damaged and passed over: {damage}")
    for checkpoint in found.current:
        # The copy of a remote run may have another path on another node.
        path = checkpoints_folder(run) / checkpoint.path.name
        problem = find_damage_together(path, group, disks)
        if problem is None:
            return path
        report(f"WARNING: {path.name} is damaged and passed over: {problem}")
    if found.current or found.abandoned or found.damaged or found.origin:
        raise CheckpointError(explain_no_checkpoint(found, run))
    nearly = [path for path, _ in found.passed_over if (path / MANIFEST_NAME).is_file()]
    if nearly:
        raise CheckpointError(
            f"{checkpoints_folder(run)} has nothing to continue from but {nearly[0].name}, which is passed over (see "
            f"above). Take it with --resume {nearly[0]}, or begin at step 0 with --resume none."
        )
    return None


def find_damage_together(folder: Path, group: dist.ProcessGroup, disks: Disks) -> str | None:
    """Run find_damage with the hashing shared by the ranks of each disk; all return the same. Collective."""
    rank = dist.get_rank(group)
    neighbours = disks.neighbours(rank)
    findings = gather(group, on_all_ranks(group, lambda: find_damage(folder, neighbours.index(rank), len(neighbours))))
    return next((finding for finding in findings if finding), None) or find_missing(folder, group)


def load_engine(engine: DeepSpeedEngine, folder: Path, state: RunState, group: dist.ProcessGroup, disks: Disks) -> None:
    """Load weights, optimizer states, buffers and frozen parameters, and set DeepSpeed's counters. Collective.

    Raises CheckpointError on every rank, before a weight changes, when the checkpoint and the engine do not have the
    same tensors.
    """
    share_files(folder, [INDEX_NAME], group, disks)
    stored = on_all_ranks(group, lambda: load_index(folder))
    has_optimizer_state = any(not key.startswith(_WEIGHTS) for key in stored)
    if has_optimizer_state:
        materialise_optimizer_state(engine)
    fragments = engine_fragments(engine)
    check_nothing_is_dropped(stored, fragments, folder)
    if has_optimizer_state or state.optimizer_scalars:
        check_same_scalars(state.optimizer_scalars, group_scalars(engine), folder)
    _fetch_pieces(folder, stored, fragments, group, disks)
    _fill(folder, fragments, group)
    write_back(engine, fragments)
    set_group_scalars(engine, state.optimizer_scalars)
    refresh_low_precision_weights(engine)
    engine.global_steps = state.step


def check_nothing_is_dropped(stored: Iterable[str], wanted: Iterable[str], folder: Path) -> None:
    """Raise CheckpointError when a checkpoint holds tensors that the engine does not have."""
    surplus = sorted(set(stored) - set(wanted))
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise CheckpointError(
            f"{folder} holds '{surplus[0]}'{more}, which this run has no place for: it belongs to another model or "
            "optimizer."
        )


def check_same_scalars(
    stored: Mapping[str, Mapping[str, float]], own: Mapping[str, Mapping[str, float]], folder: Path
) -> None:
    """Raise CheckpointError unless both hold the same numbers (Adam's `step`) for the same optimizer groups."""
    names, own_names = ({f"{group}.{key}" for group in of for key in of[group]} for of in (stored, own))
    if names != own_names:
        name = sorted(names ^ own_names)[0]
        where = "is stored and this run has no place for it" if name in names else "is not stored"
        raise CheckpointError(
            f"{folder}: the optimizer's number '{name}' {where}: the checkpoint belongs to another optimizer."
        )
    wrong = [value for numbers in stored.values() for value in numbers.values() if not is_finite_number(value)]
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]!r} is not a finite number, as optimizer states must be.")


def is_finite_number(value: object) -> bool:
    """Return whether a value from a file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load_weights(engine: DeepSpeedEngine, folder: Path, group: dist.ProcessGroup, disks: Disks) -> None:
    """Load weights and buffers only; the optimizer keeps its new state. Collective."""
    own = {key: value for key, value in engine_fragments(engine).items() if key.startswith(_WEIGHTS)}
    share_files(folder, [INDEX_NAME], group, disks)
    stored = on_all_ranks(group, lambda: load_index(folder))
    fragments = {_stored_key(key, stored): value for key, value in own.items()}
    check_nothing_is_dropped((key for key in stored if key.startswith(_WEIGHTS)), fragments, folder)
    _fetch_pieces(folder, stored, fragments, group, disks)
    _fill(folder, fragments, group)
    write_back(engine, own)
    refresh_low_precision_weights(engine)


def _stored_key(key: str, stored: Container[str]) -> str:
    """Return the key of the same weights in a checkpoint, in whose run they may have been frozen, or trained."""
    kind, _, name = key.partition("/")
    other = f"{'frozen' if kind == MASTER else MASTER}/{name}"
    return other if key not in stored and other in stored else key


def _fetch_pieces(
    folder: Path,
    stored: Mapping[str, Mapping],
    fragments: Mapping[str, Fragment],
    group: dist.ProcessGroup,
    disks: Disks,
) -> None:
    """Bring what this rank needs of a checkpoint to its disk, from the store or from other disks. Collective."""
    chunks = [
        chunk
        for key, fragment in fragments.items()
        if key in stored
        for chunk in stored_chunks(stored[key], fragment.start, fragment.local.numel())
    ]
    on_all_ranks(group, lambda: fetch_chunks(folder, chunks))
    share_files(folder, {chunk.file for chunk in chunks}, group, disks)


def _fill(folder: Path, fragments: dict[str, Fragment], group: dist.ProcessGroup) -> None:
    """Read every fragment from the checkpoint in place, empty ones included because DCP's planning is collective."""
    try:
        dcp.load(
            fragments,
            storage_reader=JsonIndexReader(folder),
            planner=FragmentLoadPlanner(),
            process_group=group,
        )
    except dcp.CheckpointException as error:
        raise _to_checkpoint_error(error, folder) from None


def _to_checkpoint_error(error: dcp.CheckpointException, folder: Path) -> CheckpointError:
    """Convert DCP's error of all ranks to one line, a CheckpointError of a rank if there is one."""
    causes = [cause for cause, _ in error.failures.values()]
    ours = [cause for cause in causes if isinstance(cause, CheckpointError)]
    return ours[0] if ours else CheckpointError(f"{folder} cannot be loaded: {' '.join(str(causes[0]).split())}")


def load_full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load all weights of a checkpoint as flat tensors by parameter name, in one process and without DeepSpeed.

    Raises CheckpointError.
    """
    weights = {key: entry for key, entry in load_index(folder).items() if key.startswith(_WEIGHTS)}
    fetch_chunks(folder, (chunk for entry in weights.values() for chunk in stored_chunks(entry)))
    fragments = {
        key: Fragment(torch.empty(entry["size"], dtype=DTYPES[entry["dtype"]]), 0, entry["size"])
        for key, entry in weights.items()
    }
    try:
        dcp.load(fragments, storage_reader=JsonIndexReader(folder), planner=FragmentLoadPlanner(), no_dist=True)
    except dcp.CheckpointException as error:
        raise _to_checkpoint_error(error, folder) from None
    return {key.partition("/")[2]: fragment.local for key, fragment in fragments.items()}
