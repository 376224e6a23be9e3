"""Continue from a checkpoint at any ZeRO stage, world size and precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llmscale.checkpoint.inventory import find_checkpoints, no_checkpoint_to_take, report_passed_over
from llmscale.checkpoint.manifest import MANIFEST_NAME, checkpoints_folder, find_damage
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.tensor_files import (
    DTYPES,
    Fragment,
    FragmentLoadPlanner,
    JsonIndexReader,
    engine_fragments,
    load_index,
)
from llmscale.engine.collectives import gather, on_all_ranks, on_main_rank
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


#: Keys of what a model is, without the optimizer.
_WEIGHTS = (f"{MASTER}/", "frozen/", "buffer/")


def find_newest_good(run: Path, group: dist.ProcessGroup, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run's current history whose every byte is as it was written; None when the run has
    none at all.

    Collective: the ranks share the hashing. `report` gets a line for everything that is passed over. Raises
    CheckpointError when there are checkpoints and none is good: starting from scratch must be the user's word.
    """
    # The main rank's answer counts: a rank that reads the folder a moment later must not choose another.
    found = on_main_rank(group, lambda: find_checkpoints(run))
    report_passed_over(found, report)
    for folder, damage in found.damaged:
        report(f"WARNING: {folder.name} is damaged and passed over: {damage}")
    for checkpoint in found.current:
        problem = find_damage_together(checkpoint.path, group)
        if problem is None:
            return checkpoint.path
        report(f"WARNING: {checkpoint.path.name} is damaged and passed over: {problem}")
    if found.current or found.abandoned or found.damaged or found.origin:
        raise CheckpointError(no_checkpoint_to_take(found, run))
    nearly = [path for path, _ in found.passed_over if (path / MANIFEST_NAME).is_file()]
    if nearly:
        raise CheckpointError(
            f"{checkpoints_folder(run)} has nothing to continue from but {nearly[0].name}, which is passed over (see "
            f"above). Take it with --resume {nearly[0]}, or begin at step 0 with --resume none."
        )
    return None


def find_damage_together(folder: Path, group: dist.ProcessGroup) -> str | None:
    """find_damage with the hashing shared by all ranks. Collective; the same answer everywhere."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    findings = gather(group, on_all_ranks(group, lambda: find_damage(folder, rank, world_size)))
    return next((finding for finding in findings if finding), None)


def load_engine(engine: DeepSpeedEngine, folder: Path, state: RunState, group: dist.ProcessGroup) -> None:
    """Fill weights, optimizer states, buffers and frozen parameters, and set DeepSpeed's counters. Collective.

    Raises CheckpointError on every rank, before a weight is changed, when the checkpoint lacks something that the
    engine has, or holds something that it has not.
    """
    stored = load_index(folder)
    has_optimizer_state = any(not key.startswith(_WEIGHTS) for key in stored)
    if has_optimizer_state:
        materialise_optimizer_state(engine)
    fragments = engine_fragments(engine)
    check_nothing_is_dropped(stored, fragments, folder)
    if has_optimizer_state or state.optimizer_scalars:
        check_same_scalars(state.optimizer_scalars, group_scalars(engine), folder)
    _fill(folder, fragments, group)
    write_back(engine, fragments)
    set_group_scalars(engine, state.optimizer_scalars)
    refresh_low_precision_weights(engine)
    engine.global_steps = state.step


def check_nothing_is_dropped(stored: Iterable[str], wanted: Iterable[str], folder: Path) -> None:
    """Raise CheckpointError when a checkpoint holds tensors that nobody asked for: whatever they are, to go on without
    them would not be to continue."""
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
        raise CheckpointError(f"{folder}: {wrong[0]!r} is no number for an optimizer.")


def is_finite_number(value: object) -> bool:
    """Whether a value from a file is a number to compute with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load_weights(engine: DeepSpeedEngine, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill weights and buffers only; the optimizer starts anew. Collective."""
    fragments = {key: value for key, value in engine_fragments(engine).items() if key.startswith(_WEIGHTS)}
    check_nothing_is_dropped((key for key in load_index(folder) if key.startswith(_WEIGHTS)), fragments, folder)
    _fill(folder, fragments, group)
    write_back(engine, fragments)
    refresh_low_precision_weights(engine)


def _fill(folder: Path, fragments: dict[str, Fragment], group: dist.ProcessGroup) -> None:
    """Read every fragment from the checkpoint, in place. Empty ones are asked for too: DCP's planning is collective."""
    try:
        dcp.load(
            fragments,
            storage_reader=JsonIndexReader(folder),
            planner=FragmentLoadPlanner(),
            process_group=group,
        )
    except dcp.CheckpointException as error:
        raise _as_ours(error, folder) from None


def _as_ours(error: dcp.CheckpointException, folder: Path) -> CheckpointError:
    """DCP's error of all ranks as one line: ours where a rank raised one."""
    causes = [cause for cause, _ in error.failures.values()]
    ours = [cause for cause in causes if isinstance(cause, CheckpointError)]
    return ours[0] if ours else CheckpointError(f"{folder} cannot be loaded: {' '.join(str(causes[0]).split())}")


def load_full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint as flat fp32 tensors by parameter name, in this one process; needs no DeepSpeed.
    Raises CheckpointError."""
    fragments = {
        key: Fragment(torch.empty(entry["size"], dtype=DTYPES[entry["dtype"]]), 0, entry["size"])
        for key, entry in load_index(folder).items()
        if key.startswith(_WEIGHTS)
    }
    try:
        dcp.load(fragments, storage_reader=JsonIndexReader(folder), planner=FragmentLoadPlanner(), no_dist=True)
    except dcp.CheckpointException as error:
        raise _as_ours(error, folder) from None
    return {key.partition("/")[2]: fragment.local for key, fragment in fragments.items()}
