"""Checks and messages for a run that resumes: refusals, changed hyperparameters, finished runs. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from llmscale.architecture.shape import SHAPE_KEYS, VOCAB_MULTIPLE
from llmscale.checkpoint.inventory import find_any_checkpoint
from llmscale.checkpoint.manifest import find_damage, is_whole, load_manifest, load_pieces
from llmscale.checkpoint.run_state import RunState, check_identity, load_run_state
from llmscale.config.launcher_variables import is_restart
from llmscale.config.resolve import resolve_schedule
from llmscale.config.run_config import KEYS, place_of
from llmscale.config.run_urls import shown, url_of
from llmscale.config.schedule import Schedule
from llmscale.errors import CheckpointError, ConfigError
from llmscale.keys import value_at
from llmscale.memory.breakdown import format_size
from llmscale.planning.disk_usage import SPARE_BYTES, checkpoints_at_once
from llmscale.training.prepare_run import PreparedRun, candidate_checkpoints
from llmscale.training.run_folder import check_own_files
from llmscale.training.sample_stream import build_stream, check_skips

#: Place of the schedule in a PreparedRun.
_SCHEDULE = "resolved.schedule."
#: Relative change of the learning rate up to which it counts as continuous.
_SMOOTH = 0.05


def check_start(run: PreparedRun) -> list[str]:
    """Refuse a start that cannot resume its checkpoint or has no space to save one.

    Returns lines on how to continue a run that is finished, and none for a run that trains. Raises CheckpointError,
    ConfigError, DataError.
    """
    config, state = run.config, None
    check_own_files(config.run)
    found = _find_source(run)
    if found is not None:
        _check_model(run, *found)
        state = found[1] if config.init_from is None else None
    stream = build_stream(run, state)
    if state is not None:
        check_identity(state.identity, run.identity(stream.identity), config.allow_changed)
    check_skips(config.skip_steps, state, run.resolved.total_steps, is_restart(os.environ))
    if found is not None and state is not None and (lines := list(finished_lines(state, run))):
        end = f"finished at step {state.step} of {run.resolved.total_steps}; run folder: {shown(config.run)}"
        # A start skips a damaged checkpoint, and takes the previous one.
        return [*lines, end] if find_damage(found[0]) is None and _is_settled(found[0], config.run) else []
    if find_any_checkpoint(config.run) is None and config.overfit_batch is None:
        _check_disk(run)
    return []


def _is_settled(checkpoint: Path, run: Path) -> bool:
    """Return whether this disk or the run's store has all of a checkpoint: the ranks need not meet."""
    pieces = load_pieces(checkpoint)
    return pieces.remote is not None if pieces else url_of(run) is None


def _find_source(run: PreparedRun) -> tuple[Path, RunState] | None:
    """Return the checkpoint that the run will begin with unless its content is damaged."""
    for folder in candidate_checkpoints(run.config):
        try:
            if is_whole(folder, load_manifest(folder)):
                return folder, load_run_state(folder)
        except CheckpointError:
            # Skipped or explained later, where checkpoints are verified.
            continue
    return None


def _check_model(run: PreparedRun, folder: Path, state: RunState) -> None:
    """Raise CheckpointError if the checkpoint's tensors belong to another model or optimizer."""
    config, shape = run.config, run.resolved.shape
    fixed = [key for key, behaviour in SHAPE_KEYS.items() if behaviour.resume == "weights"]
    saved = {key: state.hyperparameters[key] for key in fixed if key in state.hyperparameters}
    now = {key: getattr(shape, key) for key in saved}
    vocab_size = state.config.get("vocab_size") or state.identity.get("vocab_size")
    if type(vocab_size) is int and -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE != shape.padded_vocab_size:
        saved["vocab_size"], now["vocab_size"] = vocab_size, shape.vocab_size
    if config.init_from is None and state.optimizer_scalars and "optimizer" in state.hyperparameters:
        saved["optimizer"], now["optimizer"] = state.hyperparameters["optimizer"], config.optimizer
    differ = [f"{key} was {saved[key]} and is {now[key]}" for key in saved if saved[key] != now[key]]
    if config.init_from is None and (change := _describe_frozen(state, run)):
        raise CheckpointError(
            f"{folder} does not fit this run: {change}. Frozen parameters have no optimizer states. Give what it was, "
            f"or begin a new run with these weights: --init-from {folder} and another --run folder."
        )
    if differ:
        raise CheckpointError(
            f"{folder} does not fit this run: {', '.join(differ)}. Give what it was, or name another "
            f"{'checkpoint' if config.init_from else '--run folder'}."
        )


def _describe_frozen(state: RunState, run: PreparedRun) -> str | None:
    """Return how the frozen parameters differ from the checkpoint's, or None."""
    tensors, saved = run.resolved.tensors, state.hyperparameters.get("freeze")
    patterns = [str(pattern) for pattern in saved] if isinstance(saved, list) else []
    before = {tensor.name for tensor in replace(tensors, frozen=tuple(patterns)).frozen_tensors}
    after = {tensor.name for tensor in tensors.frozen_tensors}
    if before == after:
        return None
    changes = {"thawed": before - after, "frozen": after - before}
    listed = (
        f"{min(names)}{' and others' if len(names) > 1 else ''} {verb}" for verb, names in changes.items() if names
    )
    return f"--freeze was {patterns} and is {run.config.freeze} ({', '.join(listed)})"


def _check_disk(run: PreparedRun) -> None:
    """Raise ConfigError if the first checkpoints of a new run do not fit on its disk."""
    config, resolved = run.config, run.resolved
    place = next(folder for folder in (config.run, *config.run.absolute().parents) if folder.exists())
    # Those of --keep-every can be moved away during a long run.
    count = checkpoints_at_once(config.model_copy(update={"keep_every": 0}), resolved.total_steps)
    one = resolved.optimizer.checkpoint_bytes(resolved.shape.architecture)
    needed, free = count * one + SPARE_BYTES, shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"--run {config.run} cannot be written to: No space left on device for {count} checkpoint"
            f"{f's (--keep-last {config.keep_last}, the best and the next one)' if count > 1 else ''} of "
            f"{format_size(one)}: {place} has {format_size(free)} free, and {format_size(needed)} are needed with "
            "some to spare. Free some space, lower --keep-last, or name another --run."
        )


def hyperparameters(run: PreparedRun) -> dict[str, object]:
    """Return everything that decides how steps are made and may change on resume, as plain values without defaults.

    The run's identity (run_config.CHANGES_THAT_BREAK) may not change.
    """
    resolved, ds_config = run.resolved, run.resolved.ds_config
    types = cast("Mapping[str, object]", ds_config["data_types"])
    told = [key for key, behaviour in KEYS.items() if behaviour.resume in ("told", "weights")]
    return {
        "zero_stage": resolved.zero_stage,
        "world_size": resolved.plan.ranks.world_size,
        **{key: value_at(place_of(key), run) for key in told},
        "grad_accum_dtype": types["grad_accum_dtype"],
        "communication_data_type": ds_config["communication_data_type"],
    }


def change_lines(state: RunState, run: PreparedRun, now: Mapping[str, object]) -> Iterator[str]:
    """Yield the hyperparameters that differ from the checkpoint's, and a jump of the learning rate."""
    saved = state.hyperparameters
    changed = [f"{key} {_show(saved[key])} -> {_show(value)}" for key, value in now.items()
               if key in saved and saved[key] != value]  # fmt: skip
    if changed:
        yield f"changed since the checkpoint: {'; '.join(changed)}"
    if state.step >= run.resolved.total_steps:
        return
    schedule = _schedule_of(state)
    before, after = schedule.learning_rate(state.step), run.resolved.schedule.learning_rate(state.step)
    if abs(after - before) > _SMOOTH * max(before, after):
        yield (
            f"the learning rate goes from {schedule.learning_rate(max(0, state.step - 1)):.2e} to {after:.2e} at "
            f"step {state.step + 1:,}, where the checkpoint's schedule had {before:.2e}"
        )


def finished_lines(state: RunState, run: PreparedRun) -> Iterator[str]:
    """Yield how to continue a finished run; nothing if there are steps left."""
    total, config = run.resolved.total_steps, run.config
    if state.step < total:
        return
    more = 2 * state.step
    wanted = config.model_copy(update={"steps": more, "tokens": None})
    longer = resolve_schedule(wanted, run.resolved.plan, run.sets.num_train_samples)
    last, following = _schedule_of(state).learning_rate(state.step - 1), longer.learning_rate(state.step)
    yield (
        f"nothing to do: the checkpoint is at step {state.step:,} of {total:,}. To continue, give "
        f"{'more --tokens' if config.tokens else f'more --steps, such as --steps {more}'}"
    )
    if abs(following - last) > _SMOOTH * last:
        yield (
            f"with {more:,} steps the {longer.name} schedule runs over all of them: the learning rate goes from "
            f"{last:.2e} to {following:.2e} at step {state.step + 1:,}. --schedule constant --lr {last:.2e} "
            "--warmup-steps 0 continues at the last one instead"
        )


def _schedule_of(state: RunState) -> Schedule:
    fields = {place.removeprefix(_SCHEDULE): key for key in KEYS if (place := place_of(key)).startswith(_SCHEDULE)}
    return Schedule(**{field: state.hyperparameters[key] for field, key in fields.items()})  # type: ignore[arg-type]


def _show(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
