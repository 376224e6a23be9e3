"""Checkpoints of an engine of any module: saved at any ZeRO stage on any ranks, continued at any other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from llmscale.checkpoint.disks import find_disks
from llmscale.checkpoint.engine_state import EngineState, GroupState, read_engine_state
from llmscale.checkpoint.inventory import find_checkpoints
from llmscale.checkpoint.load import load_engine, load_weights
from llmscale.checkpoint.manifest import Checkpoint, History
from llmscale.checkpoint.plain_values import to_json
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.store import CheckpointStore
from llmscale.checkpoint.tensor_files import DTYPES, Fragment, engine_fragments
from llmscale.engine.collectives import gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.engine_values import (
    OF_SCHEDULER,
    check_between_steps,
    check_engine,
    group_parameters,
    group_settings,
    precision_of,
    scheduler_state,
    set_counters,
    set_group_settings,
    tensor_shapes,
    tied_names,
)
from llmscale.engine.loss_scale import get_scaler_state, set_scaler_state
from llmscale.engine.zero_layout import check_deepspeed_version, inner_optimizer, name_groups
from llmscale.engine.zero_shards import group_scalars
from llmscale.errors import CheckpointError, ConfigError, LlmscaleError
from llmscale.files.folder_lock import lock_folder

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Settings = Literal["checkpoint", "script"]
#: In place of a number of checkpoints, for all of them.
_ALL = 1 << 30
_BUFFER = "buffer/"


@dataclass(frozen=True)
class Loaded:
    """Result of `Checkpoints.load`."""

    step: int
    """Steps done: the next one is this one, counted from 0."""
    extra: dict[str, Any]
    """The values given to `save`."""
    folder: Path
    """The checkpoint."""
    changes: tuple[str, ...] = ()
    """A line per difference between the checkpoint and this engine: stage, ranks, types, settings."""


class Checkpoints:
    """The checkpoints of one engine in one folder.

    Every rank makes one at the same place, and calls its methods at the same steps.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        folder: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        in_background: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Checkpoints are in FOLDER/checkpoints. The newest `keep_last` stay (0: all), and those of steps that are
        multiples of `keep_every`. `in_background` writes while training continues. `report` gets a line per outcome on
        rank 0; without it warnings are Python's.

        Collective. Raises ConfigError for an engine whose state cannot be saved, and for a folder that another job has.
        """
        check_deepspeed_version()
        check_engine(engine)
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value < 0:
                raise ConfigError(f"{name} = {value}: it must be 0 or more.")
        if "://" in str(folder):
            raise ConfigError(f"folder = {str(folder)[:200]!r}: a loop's checkpoints need a folder, not a store.")
        self.engine = engine
        self.folder = Path(folder)
        self._in_background = in_background
        self._report = report
        self._group = dist.new_group(backend="gloo")
        disks = find_disks(self.folder, self._group)
        self._lock: TextIO | None = None
        on_each_disk(self._group, disks, self._claim)
        self._store = CheckpointStore(self.folder, self._group, disks, self._say)
        self._lines: list[str] = []
        self._saver = CheckpointSaver(
            self.folder,
            keep_last=keep_last or _ALL,
            keep_every=keep_every,
            in_background=in_background,
            report=self._lines.append,
            disks=disks,
        )
        self._has_history = False
        self._pending: int | None = None
        self._newest: int | None = None
        self._has_warned_of_buffers = False
        name_groups(engine)

    def _claim(self) -> None:
        """Lock the folder for this job. Raises ConfigError if another one has it."""
        self._lock = lock_folder(self.folder)

    def close(self) -> None:
        """Wait until nothing is being written, and give the folder and the process groups back. Collective."""
        self.wait()
        self._saver.close()
        dist.destroy_process_group(self._group)
        if self._lock is not None:
            self._lock.close()

    def save(self, step: int, extra: Mapping[str, Any] | None = None, *, with_frozen: bool = True) -> None:
        """Save everything that continuing needs after `step` optimizer steps, and rank 0's plain values of `extra`.

        Without `with_frozen`, parameters that the optimizer does not change are left out, and `load` leaves them as the
        script made them. A step that this object has just saved or loaded is not saved again. Collective; call it
        between steps.

        Raises CheckpointError on every rank, with older checkpoints untouched, unless the checkpoint is complete and
        durable; `in_background`, the next `save` or `wait` does.
        """
        self.wait()
        if self._has_history and self._newest == step:
            return
        self._enter_newest_history(step)
        engine = self.engine
        group = self._group
        state = on_all_ranks(group, self._take_state, step, extra or {}, has_frozen=with_frozen)
        values = on_main_rank(group, state.as_dict)
        fragments = copy_out(on_all_ranks(group, own_fragments, engine, with_frozen=with_frozen))
        self._warn_of_differing_buffers(fragments)
        if dist.get_rank(group):  # the buffers are rank 0's, as in a state dict that rank 0 writes
            fragments = {key: part for key, part in fragments.items() if not key.startswith(_BUFFER)}
        self._lines.clear()
        self._pending = step
        stage = engine.zero_optimization_stage()
        self._saver.save(Snapshot(step, 0, stage, state.precision, values, fragments))
        if not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Collective. Raises CheckpointError if the last save failed."""
        step = self._pending
        self._pending = None
        if step is None:
            return
        self._saver.wait()
        if self._saver.failure is not None:
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved: {self._saver.failure}. Older ones are untouched."
            )
        self._newest = step
        for line in self._lines:
            self._say(line)

    def load(
        self,
        step: int | None = None,
        *,
        settings: Settings = "checkpoint",
        weights_only: bool = False,
        with_scheduler: bool = True,
    ) -> Loaded | None:
        """Continue from the newest undamaged checkpoint, or from that of `step`; None if the folder has none.

        Every byte is verified, and every name and shape compared, before a weight changes. `settings`: "checkpoint"
        takes the optimizer's settings (betas, weight decay) from there, as torch's load_state_dict does; "script" keeps
        this engine's. Learning rates come with the scheduler's state. `weights_only` leaves optimizer, scheduler and
        counters as they are. Collective. Raises CheckpointError on every rank.
        """
        if settings not in ("checkpoint", "script"):
            raise ConfigError(f'settings = {settings!r}: must be "checkpoint" or "script".')
        self.wait()
        group = self._group
        store = self._store
        on_all_ranks(group, check_between_steps, self.engine)
        store.remove_leftovers()
        store.share()
        listing = store.list()
        if step is None:
            source = store.newest_whole(listing)
        else:
            source = store.open(step)
        if source is None:
            return None
        state = on_main_rank(group, read_engine_state, source)
        on_all_ranks(group, self._check_fits, state, source, with_scheduler=with_scheduler and not weights_only)
        if weights_only:
            load_weights(self.engine, source.path, group, store.disks, keeps=_is_left_out(state))
            return Loaded(state.step, state.extra, source.path, ("weights only",))
        changes = self._continue(state, source, settings, with_scheduler=with_scheduler)
        self._saver.history = store.enter_history(source, listing)
        self._has_history = True
        self._newest = state.step
        return Loaded(state.step, state.extra, source.path, tuple(changes))

    def _continue(
        self, state: EngineState, source: Checkpoint, settings: Settings, *, with_scheduler: bool
    ) -> list[str]:
        """Set the engine to a checkpoint, and return what differs. Collective."""
        engine = self.engine
        group = self._group
        before = group_settings(engine)
        matches = on_all_ranks(group, match_groups, state.groups, engine, source.path, settings=settings)
        scalars = on_all_ranks(group, scalars_of_groups, state, matches, engine, source.path)
        changes = describe_changes(state, engine, ranks=source.manifest.world_size, stage=source.manifest.zero_stage)
        cast_line = load_engine(
            engine,
            source.path,
            scalars,
            group,
            self._store.disks,
            with_frozen=state.has_frozen,
            steps_taken=max(0, state.global_steps - state.skipped_steps),
        )
        changes += [cast_line] if cast_line else []
        sets_rates = settings == "checkpoint" or (with_scheduler and state.scheduler is not None)
        changes += take_settings(engine, matches, before, settings, sets_rates=sets_rates)
        set_scaler_state(engine, cast("dict[str, float] | None", state.loss_scaler))
        set_counters(engine, steps=state.global_steps, samples=state.global_samples, skipped_steps=state.skipped_steps)
        if with_scheduler and state.scheduler is not None:
            engine.lr_scheduler.load_state_dict(state.scheduler)
        return changes

    def _check_fits(self, state: EngineState, source: Checkpoint, *, with_scheduler: bool) -> None:
        """Raise CheckpointError unless the engine has the checkpoint's shapes, and a scheduler if it has one."""
        own = tensor_shapes(self.engine)
        _check_names(state.shapes.keys(), own.keys(), source.path)
        check_shapes(state.shapes, own, source.path)
        has_scheduler = scheduler_state(self.engine) is not None
        if with_scheduler and has_scheduler != (state.scheduler is not None):
            here, there = ("with", "without") if has_scheduler else ("without", "with")
            raise CheckpointError(
                f"{source.path} was saved {there} a learning-rate scheduler, and this engine was built {here} one. "
                "Build it alike, or load with with_scheduler=False."
            )

    def _enter_newest_history(self, step: int) -> None:
        """Continue the folder's history at the first save. Collective. Raises CheckpointError in a folder whose
        checkpoints were not loaded: theirs are later steps, and these would be deleted as the oldest."""
        if not self._has_history:
            self._saver.history, self._newest = on_main_rank(self._group, _find_newest, self.folder)
            self._has_history = True
        if self._newest is not None and step <= self._newest:
            raise CheckpointError(
                f"{self.folder} has a checkpoint of step {self._newest}, and step {step} is not after it. Call load() "
                "before the first step, or name another folder."
            )

    def _take_state(self, step: int, extra: Mapping[str, Any], *, has_frozen: bool) -> EngineState:
        engine = self.engine
        check_between_steps(engine)
        names = [str(group["name"]) for group in inner_optimizer(engine).param_groups]
        groups = zip(names, group_parameters(engine), group_settings(engine), strict=True)
        return EngineState(
            step=step,
            precision=precision_of(engine),
            optimizer_scalars=group_scalars(engine),
            groups=tuple(GroupState(name, parameters, _plain(values)) for name, parameters, values in groups),
            shapes=tensor_shapes(engine),
            tied=tied_names(engine),
            scheduler=scheduler_state(engine),
            loss_scaler=get_scaler_state(engine),
            skipped_steps=engine.skipped_steps,
            global_steps=engine.global_steps,
            global_samples=engine.global_samples,
            train_batch_size=engine.train_batch_size(),
            has_frozen=has_frozen,
            extra=dict(extra),
        )

    def _warn_of_differing_buffers(self, fragments: Mapping[str, Fragment]) -> None:
        if self._has_warned_of_buffers:
            return
        hashes = {key: _hash(part.local) for key, part in fragments.items() if key.startswith(_BUFFER)}
        of_ranks = gather(self._group, hashes)
        differ = [key for key in hashes if len({of_rank[key] for of_rank in of_ranks}) > 1]
        if differ:
            self._has_warned_of_buffers = True
            self._say(
                f"WARNING: {len(differ)} of {len(hashes)} buffers differ between ranks, such as '{differ[0]}': those "
                "of rank 0 are saved"
            )

    def _say(self, line: str) -> None:
        if dist.get_rank(self._group):
            return
        if self._report is not None:
            self._report(line)
        elif line.startswith("WARNING: "):
            warnings.warn(line.removeprefix("WARNING: "), stacklevel=4)


def _is_left_out(state: EngineState) -> Callable[[str], bool]:
    """Return a function that tells whether a checkpoint was saved without a '<state>/<name>'."""
    return lambda key: not state.has_frozen and key.startswith("frozen/")


def _hash(tensor: Tensor) -> str:
    return xxhash.xxh3_128(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _find_newest(run: Path) -> tuple[History, int | None]:
    listing = find_checkpoints(run)
    return listing.history, listing.current[0].step if listing.current else None


def own_fragments(engine: DeepSpeedEngine, *, with_frozen: bool = True) -> dict[str, Fragment]:
    """Return everything that this rank owns. Raises CheckpointError for a type that no checkpoint holds."""
    fragments = engine_fragments(engine, with_frozen=with_frozen)
    for key, fragment in fragments.items():
        if str(fragment.local.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"'{key}' is {fragment.local.dtype}. A checkpoint holds {', '.join(DTYPES)}.")
    return fragments


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that a checkpoint can hold; functions and the like are the script's."""
    plain = {}
    for key, value in settings.items():
        try:
            to_json(value, key)
        except LlmscaleError:
            continue
        plain[key] = value
    return plain


def _check_names(stored: Set[str], own: Set[str], folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint and the model have parameters and buffers of the same names."""
    if surplus := sorted(stored - own):
        raise CheckpointError(
            f"{folder} holds '{surplus[0]}', for which this model has no place: {len(surplus)} of its tensors belong "
            "to another one."
        )
    if missing := sorted(own - stored):
        raise CheckpointError(
            f"{folder} has no '{missing[0]}', and lacks {len(missing)} of this model's tensors in all."
        )


def check_shapes(stored: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]], folder: Path) -> None:
    """Raise CheckpointError for a tensor that has another shape in a checkpoint, if with as many elements."""
    for name, shape in own.items():
        if name in stored and tuple(stored[name]) != tuple(shape):
            raise CheckpointError(
                f"'{name}' is {list(stored[name])} in {folder} and {list(shape)} in this model, which is another one."
            )


def describe_changes(state: EngineState, engine: DeepSpeedEngine, *, ranks: int, stage: int) -> list[str]:
    """Return a line per fact of an engine that is another one than when `state` was saved at a stage on some ranks."""
    facts = {
        "ZeRO stage": (stage, engine.zero_optimization_stage()),
        "ranks": (ranks, dist.get_world_size()),
        "precision": (state.precision, precision_of(engine)),
        "global batch": (state.train_batch_size or engine.train_batch_size(), engine.train_batch_size()),
    }
    return [f"{name} {was} -> {now}" for name, (was, now) in facts.items() if was != now]


def match_groups(
    stored: Sequence[GroupState], engine: DeepSpeedEngine, place: Path, *, settings: Settings
) -> list[GroupState | None]:
    """Return the stored group of each of the optimizer's groups: the one of the same parameters, whatever its name.

    Raises CheckpointError if one has none, unless the `settings` are the script's.
    """
    known = {frozenset(group.parameters): group for group in stored}
    own = group_parameters(engine)
    matches = [known.get(frozenset(parameters)) for parameters in own]
    if settings == "checkpoint" and None in matches:
        group = inner_optimizer(engine).param_groups[matches.index(None)]
        raise CheckpointError(
            f"the optimizer's {group['name']} has other parameters than any group in {place}, so that it is not known "
            'whose settings it takes. Build the groups as they were, or load with settings="script".'
        )
    return matches


def scalars_of_groups(
    state: EngineState, matches: Sequence[GroupState | None], engine: DeepSpeedEngine, place: Path
) -> dict[str, dict[str, float]]:
    """Return the optimizer's stored numbers by the names of this engine's groups. Raises CheckpointError for a group
    whose parameters were in groups of different numbers."""
    group_of = {name: group.name for group in state.groups for name in group.parameters}
    scalars = {}
    names = [str(group["name"]) for group in inner_optimizer(engine).param_groups]
    for name, parameters, match in zip(names, group_parameters(engine), matches, strict=True):
        if match:
            origins = {match.name}
        else:
            origins = {group_of[member] for member in parameters if member in group_of}
        known = state.optimizer_scalars
        of_origins = [dict(known[origin]) for origin in sorted(origins) if origin in known]
        if any(numbers != of_origins[0] for numbers in of_origins):
            raise CheckpointError(
                f"the optimizer's {name} joins parameters of groups that have taken different numbers of steps in "
                f"{place}."
            )
        if of_origins:
            scalars[name] = of_origins[0]
    return scalars


def take_settings(
    engine: DeepSpeedEngine,
    matches: Sequence[GroupState | None],
    before: Sequence[Mapping[str, object]],
    settings: Settings,
    *,
    sets_rates: bool,
) -> list[str]:
    """Set the stored settings, or those of them that the script did not give `before`; return a line per difference."""
    lines = []
    for number, (group, own) in enumerate(zip(matches, before, strict=True)):
        stored = group.settings if group else {}
        taken = {key: value for key, value in stored.items() if settings == "checkpoint" or key not in own}
        if sets_rates:
            taken |= {key: value for key, value in stored.items() if key in OF_SCHEDULER}
        set_group_settings(engine, number, taken)
        for key, value in stored.items():
            if key in own and key not in OF_SCHEDULER and own[key] != value:
                if settings == "checkpoint":
                    verb = "taken from the checkpoint"
                else:
                    verb = "kept as the script has it"
                name = group.name if group else number
                lines.append(f"{name}.{key}: {value} there, {own[key]} here: {verb}")
    return lines
