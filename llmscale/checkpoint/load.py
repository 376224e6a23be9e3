"""Load a checkpoint into an engine of any ZeRO stage, world size and precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.checkpoint.disks import share_files
from llmscale.checkpoint.remote_run import fetch_chunks
from llmscale.checkpoint.tensor_files import (
    DTYPES,
    INDEX_NAME,
    WEIGHTS,
    Fragment,
    Index,
    check_sizes,
    engine_fragments,
    fill_fragments,
    load_index,
    stored_chunks,
)
from llmscale.engine.collectives import Disks, on_all_ranks
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


def load_engine(
    engine: DeepSpeedEngine,
    folder: Path,
    scalars: Mapping[str, Mapping[str, float]],
    group: dist.ProcessGroup,
    disks: Disks,
    *,
    with_frozen: bool = True,
    steps_taken: int | None = None,
) -> str | None:
    """Load weights, optimizer states, buffers and, `with_frozen`, frozen parameters. Collective.

    `scalars` are the optimizer's numbers by group, as group_scalars returns them. `steps_taken` are the optimizer's
    steps, where parameters may have had none of them: those without a gradient at stage 0, and all before the first
    step. Such parameters have no states, which begin at zero. None requires all states.

    Returns a line if the engine keeps master weights and states in another type than the checkpoint, else None. Raises
    CheckpointError on every rank, before a weight changes, when the checkpoint and the engine do not have the same
    tensors.
    """
    share_files(folder, [INDEX_NAME], group, disks)
    stored = on_all_ranks(group, lambda: load_index(folder))
    has_optimizer_state = any(not key.startswith(WEIGHTS) for key in stored)
    if has_optimizer_state or steps_taken:
        materialise_optimizer_state(engine)
    fragments = engine_fragments(engine, with_frozen=with_frozen)
    if steps_taken is None:
        unstepped = {}
    else:
        unstepped = _unstepped(stored, fragments, steps_taken)
    filled = {key: part for key, part in fragments.items() if key not in unstepped}
    check_nothing_is_dropped(stored, fragments, folder)
    if steps_taken is not None:
        own = group_scalars(engine)
        scalars = {name: scalars.get(name, dict.fromkeys(own[name], 0.0)) for name in own} | {**scalars}
    if has_optimizer_state or scalars:
        check_same_scalars(scalars, group_scalars(engine), folder)
    _fill(folder, stored, filled, group, disks)
    for part in unstepped.values():
        part.local.zero_()
    write_back(engine, fragments)
    set_group_scalars(engine, scalars)
    refresh_low_precision_weights(engine)
    return _describe_cast(stored, fragments)


def _unstepped(stored: Iterable[str], wanted: Mapping[str, Fragment], steps_taken: int) -> dict[str, Fragment]:
    """Return the optimizer states that are not stored, of kinds that are, or of all kinds before the first step."""
    known = {*stored}
    kinds = {key.partition("/")[0] for key in known}
    return {
        key: part
        for key, part in wanted.items()
        if not key.startswith(WEIGHTS) and key not in known and (not steps_taken or key.partition("/")[0] in kinds)
    }


def _describe_cast(stored: Mapping[str, Mapping], fragments: Mapping[str, Fragment]) -> str | None:
    key = next(key for key in fragments if key.startswith(MASTER))
    before = DTYPES[stored[key]["dtype"]]
    now = fragments[key].local.dtype
    if before == now:
        return None
    names = f"master weights and optimizer states change from {_name(before)} to {_name(now)}"
    is_exact = torch.promote_types(before, now) == now
    return f"{names}: {'they are taken over exactly' if is_exact else 'they are rounded once'}"


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


def check_nothing_is_dropped(stored: Iterable[str], wanted: Iterable[str], folder: Path) -> None:
    """Raise CheckpointError when a checkpoint holds tensors that the engine does not have."""
    surplus = sorted(set(stored) - set(wanted))
    if surplus:
        if len(surplus) > 1:
            more = f" and {len(surplus) - 1} more"
        else:
            more = ""
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
        if name in names:
            where = "is stored and this run has no place for it"
        else:
            where = "is not stored"
        raise CheckpointError(
            f"{folder}: the optimizer's number '{name}' {where}: the checkpoint belongs to another optimizer."
        )
    wrong = [value for numbers in stored.values() for value in numbers.values() if not math.isfinite(value)]
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]!r} is not a finite number, as optimizer states must be.")


def load_weights(
    engine: DeepSpeedEngine,
    folder: Path,
    group: dist.ProcessGroup,
    disks: Disks,
    *,
    keeps: Callable[[str], bool] = lambda key: False,
) -> None:
    """Load weights and buffers only; the optimizer keeps its new state. Collective.

    Weights for whose '<state>/<name>' `keeps` returns True, such as adapters, stay as they are.
    """
    own = {key: value for key, value in engine_fragments(engine).items() if key.startswith(WEIGHTS) and not keeps(key)}
    share_files(folder, [INDEX_NAME], group, disks)
    stored = on_all_ranks(group, lambda: load_index(folder))
    fragments = {_stored_key(key, stored): value for key, value in own.items()}
    check_nothing_is_dropped((key for key in stored if key.startswith(WEIGHTS)), fragments, folder)
    _fill(folder, stored, fragments, group, disks)
    write_back(engine, own)
    refresh_low_precision_weights(engine)


def _stored_key(key: str, stored: Container[str]) -> str:
    """Return the key of the same weights in a checkpoint, in whose run they may have been frozen, or trained."""
    kind, _, name = key.partition("/")
    other = f"{'frozen' if kind == MASTER else MASTER}/{name}"
    return other if key not in stored and other in stored else key


def _fill(
    folder: Path, stored: Index, fragments: Mapping[str, Fragment], group: dist.ProcessGroup, disks: Disks
) -> None:
    """Bring what this rank needs of a checkpoint to its disk, from the store or from other disks, and read it.

    Collective. Raises CheckpointError on every rank; tensors that do not match are refused before any is changed.
    """
    on_all_ranks(group, lambda: check_sizes(stored, fragments))
    chunks = [
        chunk
        for key, fragment in fragments.items()
        for chunk in stored_chunks(stored[key], fragment.start, fragment.local.numel())
    ]
    on_all_ranks(group, lambda: fetch_chunks(folder, chunks))
    share_files(folder, {chunk.file for chunk in chunks}, group, disks)
    on_all_ranks(group, lambda: fill_fragments(folder, stored, fragments))
