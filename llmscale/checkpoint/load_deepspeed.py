"""A checkpoint of DeepSpeed itself, of any ranks and ZeRO stage, into an engine of any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.checkpoint.checkpoints import (
    Loaded,
    Settings,
    check_shapes,
    describe_changes,
    match_groups,
    own_fragments,
    scalars_of_groups,
    take_settings,
)
from llmscale.checkpoint.deepspeed_files import open_deepspeed_checkpoint
from llmscale.checkpoint.deepspeed_pickles import tag_folder
from llmscale.checkpoint.portable import PortableCheckpoint, StoredTensor
from llmscale.checkpoint.tensor_files import MASTER, WEIGHTS, Fragment
from llmscale.engine.collectives import on_all_ranks
from llmscale.engine.engine_values import (
    check_between_steps,
    check_engine,
    group_parameters,
    group_settings,
    set_counters,
    tensor_shapes,
)
from llmscale.engine.loss_scale import set_scaler_state
from llmscale.engine.zero_layout import check_deepspeed_version, name_groups
from llmscale.engine.zero_shards import (
    materialise_optimizer_state,
    refresh_low_precision_weights,
    set_group_scalars,
    write_back,
)
from llmscale.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def load_deepspeed(
    engine: DeepSpeedEngine,
    folder: str | Path,
    tag: str | None = None,
    *,
    settings: Settings = "checkpoint",
    weights_only: bool = False,
    with_scheduler: bool = True,
    allow: Sequence[type] = (),
) -> Loaded:
    """Continue a checkpoint of DeepSpeed, native or universal, of any stage and ranks. Collective.

    `settings`: "checkpoint" takes learning rates, betas and the like from there, "script" keeps the engine's. `allow`:
    classes of yours that client_state or the scheduler hold. Raises CheckpointError on every rank, before a weight
    changes, unless it has every tensor of the engine.
    """
    if settings not in ("checkpoint", "script"):
        raise ConfigError(f'settings = {settings!r}: must be "checkpoint" or "script".')
    check_deepspeed_version()
    check_engine(engine)
    group = dist.new_group(backend="gloo")
    try:
        name_groups(engine)
        on_all_ranks(group, check_between_steps, engine)
        stored = on_all_ranks(group, _open, engine, Path(folder), tag, allow, weights_only=weights_only)
        if weights_only:
            changes = ["weights only", *_load_tensors(engine, stored, group, weights_only=True)]
        else:
            changes = _continue(engine, stored, group, settings, with_scheduler=with_scheduler)
    finally:
        dist.destroy_process_group(group)
    return Loaded(stored.step, dict(stored.client_state), stored.path, tuple(changes))


def _open(
    engine: DeepSpeedEngine, folder: Path, tag: str | None, allow: Sequence[type], *, weights_only: bool
) -> PortableCheckpoint:
    place = tag_folder(folder, tag)
    if place is None:
        raise CheckpointError(f"{folder} has no file 'latest': name the tag, such as global_step100.")
    stored = open_deepspeed_checkpoint(place, group_parameters(engine), allow).with_plain_names()
    if stored.zero_stage == 0 and stored.precision == "fp16" and not weights_only:
        raise CheckpointError(
            f"{place} was trained in fp16 at ZeRO stage 0, where DeepSpeed divides gradients by a loss scale that "
            "it never applied: its optimizer cannot be continued rightly. Load the weights alone (weights_only=True)."
        )
    check_shapes(stored.shapes, tensor_shapes(engine), place)
    return stored


def _continue(
    engine: DeepSpeedEngine,
    stored: PortableCheckpoint,
    group: dist.ProcessGroup,
    settings: Settings,
    *,
    with_scheduler: bool,
) -> list[str]:
    """Set the engine to a checkpoint, and return what differs. Collective."""
    state = stored.engine_state
    before = group_settings(engine)
    matches = on_all_ranks(group, match_groups, state.groups, engine, stored.path, settings=settings)
    scalars = on_all_ranks(group, scalars_of_groups, state, matches, engine, stored.path)
    changes = describe_changes(state, engine, ranks=stored.ranks, stage=stored.zero_stage)
    changes += _load_tensors(engine, stored, group, weights_only=False)
    set_group_scalars(engine, scalars)
    has_scheduler = hasattr(engine.lr_scheduler, "load_state_dict")
    takes_schedule = with_scheduler and has_scheduler and bool(stored.scheduler)
    changes += take_settings(engine, matches, before, settings, sets_rates=settings == "checkpoint" or takes_schedule)
    set_scaler_state(engine, stored.scaler_state)
    set_counters(engine, steps=stored.step, samples=stored.global_samples, skipped_steps=stored.skipped_steps)
    if takes_schedule:
        engine.lr_scheduler.load_state_dict(stored.scheduler)
    elif with_scheduler and stored.scheduler:
        changes.append("the state of its learning-rate scheduler is left out, as this engine has none")
    elif with_scheduler and has_scheduler:
        changes.append("it has no learning-rate scheduler: this engine's begins at its first step")
    return changes


def _load_tensors(
    engine: DeepSpeedEngine, stored: PortableCheckpoint, group: dist.ProcessGroup, *, weights_only: bool
) -> list[str]:
    """Load weights and states; return a line per frozen parameter that was not saved. Collective."""
    if not weights_only and any(not key.startswith(WEIGHTS) for key in stored.tensors):
        materialise_optimizer_state(engine)
    fragments = on_all_ranks(group, own_fragments, engine)
    if weights_only:
        fragments = {key: fragment for key, fragment in fragments.items() if key.startswith(WEIGHTS)}
    sources, missing = on_all_ranks(group, _match, stored, fragments, weights_only=weights_only)
    for key, fragment in fragments.items():
        if key in sources:
            sources[key].fill(fragment.local, fragment.start)
        elif not key.startswith(WEIGHTS):
            fragment.local.zero_()
    write_back(engine, fragments)
    refresh_low_precision_weights(engine)
    on_all_ranks(group, _check_masters, engine, sources)
    reasons = {name: "WARNING: DeepSpeed did not save it: " for name in missing if name in stored.lost}
    return [f"{reasons.get(name, '')}{name} stays as the script made it" for name in missing]


def _check_masters(engine: DeepSpeedEngine, sources: Mapping[str, StoredTensor]) -> None:
    """Compare this rank's master weights with the files. Raises CheckpointError."""
    for key, fragment in own_fragments(engine).items():
        if not key.startswith(f"{MASTER}/") or key not in sources:
            continue
        expected = torch.empty_like(fragment.local)
        sources[key].fill(expected, fragment.start)
        if not torch.equal(expected.nan_to_num(), fragment.local.nan_to_num()):
            raise CheckpointError(
                f"'{key}' of the engine is not what was read, although it was written: this DeepSpeed stores "
                "weights in a way that llmscale does not know. Please report it."
            )


def _match(
    stored: PortableCheckpoint, fragments: Mapping[str, Fragment], *, weights_only: bool
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the source of each fragment, and the names of parameters that nobody saved. Raises CheckpointError."""
    sources: dict[str, StoredTensor] = {}
    missing = []
    own_names = {key.partition("/")[2] for key in fragments}
    for key, fragment in fragments.items():
        kind, _, name = key.partition("/")
        source = _find_source(stored, kind, name, weights_only=weights_only)
        if source is None and kind == "frozen" and (name in stored.lost or not stored.has_frozen):
            missing.append(name)
            continue
        if source is None and not key.startswith(WEIGHTS) and f"{MASTER}/{name}" in stored.tensors:
            continue  # a parameter that never had a gradient has no state
        if source is None:
            raise CheckpointError(f"{stored.path} has no '{key}': it is of another model or optimizer.")
        if source.total != fragment.total:
            raise CheckpointError(
                f"'{key}' has {source.total:,} elements in {stored.path} and {fragment.total:,} in this model."
            )
        sources[key] = source
    surplus = [
        name for _, name, _ in stored.parts(MASTER, "frozen", "buffer") if name not in own_names | {*stored.tied}
    ]
    if surplus:
        raise CheckpointError(
            f"{stored.path} holds '{surplus[0]}' (and {len(surplus) - 1} more), which this model has no place for."
        )
    return sources, missing


def _find_source(stored: PortableCheckpoint, kind: str, name: str, *, weights_only: bool) -> StoredTensor | None:
    if f"{kind}/{name}" not in stored.tensors:
        name = stored.tied.get(name, name)
    kinds = [kind]
    if kind == "frozen" or (kind == MASTER and weights_only):  # frozen here and trained there, or the other way
        kinds += [MASTER, "frozen"]
    return next((stored.tensors[f"{one}/{name}"] for one in kinds if f"{one}/{name}" in stored.tensors), None)
