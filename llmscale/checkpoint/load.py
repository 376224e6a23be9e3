"""Continue from a checkpoint at any ZeRO stage, world size and precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llmscale.checkpoint.fragments import Fragment, FragmentLoadPlanner, engine_fragments
from llmscale.checkpoint.json_storage import JsonIndexReader, load_index
from llmscale.checkpoint.manifest import checkpoints_folder, find_damage, list_checkpoints
from llmscale.checkpoint.run_state import RunState
from llmscale.engine.zero_shards import (
    MASTER,
    materialise_optimizer_state,
    refresh_low_precision_weights,
    set_group_scalars,
    write_back,
)
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def find_newest_good(run: Path, group: dist.ProcessGroup, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run whose every byte is as it was written; None when the run has none at all.

    Collective: the ranks share the hashing. `report` gets a line for every damaged one that is passed over. Raises
    CheckpointError when there are checkpoints and none is good: starting from scratch must be the user's word.
    """
    candidates: list[list[Path]] = [list_checkpoints(run)]
    # The main rank's list counts: a rank that reads the folder a moment later must not choose another.
    dist.broadcast_object_list(candidates, src=0, group=group)
    for folder in candidates[0]:
        damage = find_damage_together(folder, group)
        if damage is None:
            return folder
        report(f"WARNING: {folder.name} is damaged and passed over: {damage}")
    if candidates[0]:
        raise CheckpointError(
            f"none of the {len(candidates[0])} checkpoints in {checkpoints_folder(run)} is whole. "
            "To start from scratch, use another --run folder."
        )
    return None


def find_damage_together(folder: Path, group: dist.ProcessGroup) -> str | None:
    """find_damage with the hashing shared by all ranks. Collective; the same answer everywhere."""
    findings: list[str | None] = [None] * dist.get_world_size(group)
    own = find_damage(folder, dist.get_rank(group), dist.get_world_size(group))
    dist.all_gather_object(findings, own, group=group)
    return next((finding for finding in findings if finding), None)


def load_engine(engine: DeepSpeedEngine, folder: Path, state: RunState, group: dist.ProcessGroup) -> None:
    """Fill weights, optimizer states, buffers and frozen parameters, and set DeepSpeed's counters. Collective."""
    stored = load_index(folder)
    if any(not key.startswith((f"{MASTER}/", "frozen/", "buffer/")) for key in stored):
        materialise_optimizer_state(engine)
    fragments = engine_fragments(engine)
    _fill(folder, fragments, group)
    write_back(engine, fragments)
    set_group_scalars(engine, state.optimizer_scalars)
    refresh_low_precision_weights(engine)
    engine.global_steps = state.step


def load_weights(engine: DeepSpeedEngine, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill weights and buffers only; the optimizer starts anew. Collective."""
    kinds = (f"{MASTER}/", "frozen/", "buffer/")
    fragments = {key: value for key, value in engine_fragments(engine).items() if key.startswith(kinds)}
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
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, CheckpointError)]
        raise (causes[0] if causes else CheckpointError(f"{folder} cannot be loaded: {error}")) from None


def load_full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint as flat fp32 tensors by parameter name, in this one process; needs no DeepSpeed."""
    fragments = {
        key: Fragment(torch.empty(entry["size"], dtype=getattr(torch, entry["dtype"])), 0, entry["size"])
        for key, entry in load_index(folder).items()
        if key.startswith((f"{MASTER}/", "frozen/", "buffer/"))
    }
    dcp.load(fragments, storage_reader=JsonIndexReader(folder), planner=FragmentLoadPlanner(), no_dist=True)
    return {key.partition("/")[2]: fragment.local for key, fragment in fragments.items()}
