"""What a continued run does differently from the one that was saved: what is refused, what is said, and how to continue
a finished one. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from llmscale.architecture.shape import SHAPE_KEYS, VOCAB_MULTIPLE
from llmscale.checkpoint.inventory import find_any_checkpoint, read_state
from llmscale.checkpoint.manifest import find_damage, is_whole, load_manifest
from llmscale.checkpoint.run_state import RunState, check_identity, parse_run_state
from llmscale.config.launcher_variables import is_restart
from llmscale.config.resolve import resolve_schedule
from llmscale.config.schedule import Schedule
from llmscale.errors import CheckpointError, ConfigError
from llmscale.memory.format_bytes import format_size
from llmscale.planning.disk_usage import SPARE_BYTES, checkpoints_at_once
from llmscale.training.run_data import build_stream
from llmscale.training.run_folder import check_own_files
from llmscale.training.run_inputs import PreparedRun, as_plain, find_sources
from llmscale.training.skipped_steps import check_skips

#: Of the configuration: what decides how steps are made and follows from nothing else.
_KEYS = (
    *("optimizer", "muon_lr_factor", "weight_decay", "beta1", "beta2", "eps"),
    *("document_mask", "keep_zeros", "loss_chunk_tokens", "loss_kernel", "z_loss"),
)
#: Of the schedule, in the words of the flags.
_SCHEDULE = {
    "peak_lr": "lr",
    "name": "schedule",
    "total_steps": "steps",
    "warmup_steps": "warmup_steps",
    "decay_steps": "decay_steps",
    "min_lr_frac": "min_lr_frac",
}
#: Of the shape: what leaves every weight its meaning.
_FREE_KEYS = ("dropout", "activation", "norm_eps", "rope_theta", "rope_scaling", "sliding_window")
#: Learning rates nearer to each other than this are one that goes on.
_SMOOTH = 0.05


def check_start(run: PreparedRun) -> list[str]:
    """Refuse a start that cannot continue its checkpoint, or that has no room to save one. Returns how to continue a
    run that has nothing left to do; nothing for a run that trains.

    Raises CheckpointError, ConfigError, DataError.
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
        end = f"finished at step {state.step} of {run.resolved.total_steps}; run folder: {config.run}"
        # The start passes over a damaged checkpoint, and takes the one before.
        return [*lines, end] if find_damage(found[0]) is None else []
    if find_any_checkpoint(config.run) is None:
        _check_disk(run)
    return []


def _find_source(run: PreparedRun) -> tuple[Path, RunState] | None:
    """Return the checkpoint that the run will begin with unless its content is damaged."""
    for folder in find_sources(run.config):
        try:
            if is_whole(folder, load_manifest(folder)):
                return folder, parse_run_state(read_state(folder))
        except CheckpointError:
            # It will be passed over or explained where checkpoints are verified.
            continue
    return None


def _check_model(run: PreparedRun, folder: Path, state: RunState) -> None:
    """Raise CheckpointError where the checkpoint's tensors are another model's or another optimizer's."""
    config, shape = run.config, run.resolved.shape
    saved = {key: value for key, value in state.hyperparameters.items() if key in SHAPE_KEYS and key not in _FREE_KEYS}
    now = {key: getattr(shape, key) for key in saved}
    vocab_size = state.config.get("vocab_size") or state.identity.get("vocab_size")
    if type(vocab_size) is int and -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE != shape.padded_vocab_size:
        saved["vocab_size"], now["vocab_size"] = vocab_size, shape.vocab_size
    if config.init_from is None and state.optimizer_scalars and "optimizer" in state.hyperparameters:
        saved["optimizer"], now["optimizer"] = state.hyperparameters["optimizer"], config.optimizer
    differ = [f"{key} was {saved[key]} and is {now[key]}" for key in saved if saved[key] != now[key]]
    if differ:
        raise CheckpointError(
            f"{folder} does not fit this run: {', '.join(differ)}. Give what it was, or name another "
            f"{'checkpoint' if config.init_from else '--run folder'}."
        )


def _check_disk(run: PreparedRun) -> None:
    """Raise ConfigError where the first checkpoints of a new run do not fit on its disk."""
    config, resolved = run.config, run.resolved
    place = next(folder for folder in (config.run, *config.run.absolute().parents) if folder.exists())
    # Those that are kept for ever can be moved away in the course of a long run.
    count = checkpoints_at_once(config.model_copy(update={"keep_every": 0}), resolved.total_steps)
    one = resolved.optimizer.state_bytes(resolved.shape.architecture)
    needed, free = count * one + SPARE_BYTES, shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"--run {config.run} cannot be written to: No space left on device for {count} checkpoint"
            f"{f's (--keep-last {config.keep_last}, and the next one)' if count > 1 else ''} of {format_size(one)}: "
            f"{place} has {format_size(free)} free, and {format_size(needed)} are needed with some to spare. "
            "Free some space, lower --keep-last, or name another --run."
        )


def hyperparameters(run: PreparedRun) -> dict[str, object]:
    """What decides how steps are made, with every default filled in; it may change on resume. Plain values.

    What may not is the run's identity (run_config.CHANGES_THAT_BREAK).
    """
    config, resolved = run.config, run.resolved
    ds_config, schedule = resolved.ds_config, asdict(resolved.schedule)
    values: dict[str, object] = {flag: schedule[key] for key, flag in _SCHEDULE.items()}
    values |= {key: getattr(config, key) for key in _KEYS}
    values |= {key: getattr(resolved.shape, key) for key in SHAPE_KEYS}
    types = cast("Mapping[str, object]", ds_config["data_types"])
    return values | {
        "gradient_clipping": ds_config["gradient_clipping"],
        "precision": resolved.precision,
        "grad_accum_dtype": types["grad_accum_dtype"],
        "communication_data_type": ds_config["communication_data_type"],
        "zero_stage": resolved.zero_stage,
        "world_size": resolved.plan.ranks.world_size,
        "micro_batch_size": resolved.plan.micro_batch_size,
        "activation_checkpointing": resolved.checkpointing,
        "compile": run.compilation.backend or "off",
    }


def change_lines(state: RunState, run: PreparedRun, now: Mapping[str, object]) -> Iterator[str]:
    """Every hyperparameter that differs from the checkpoint's, and where the learning rate goes; nothing if none."""
    saved = state.hyperparameters
    if not saved:  # written before they were stored: what the user said is compared
        plain = as_plain(run.config)
        now = {key: plain[key] for key in now if plain.get(key) is not None}
        saved = {key: state.config[key] for key in now if key in state.config}
    elif saved.get("precision") == "autocast":
        # Ranks exchanged gradients in fp32 under autocast as long as this was not stored.
        saved = {"communication_data_type": "fp32", **saved}
    changed = [f"{key} {_show(saved[key])} -> {_show(value)}" for key, value in now.items()
               if key in saved and saved[key] != value]  # fmt: skip
    if changed:
        yield f"changed since the checkpoint: {'; '.join(changed)}"
    before = _schedule_of(state)
    if before is not None and state.step < run.resolved.total_steps:
        then, after = before.learning_rate(state.step), run.resolved.schedule.learning_rate(state.step)
        if abs(after - then) > _SMOOTH * max(then, after):
            yield (
                f"the learning rate goes from {before.learning_rate(max(0, state.step - 1)):.2e} to {after:.2e} at "
                f"step {state.step + 1:,}, where the checkpoint's schedule had {then:.2e}"
            )


def finished_lines(state: RunState, run: PreparedRun) -> Iterator[str]:
    """How to go on with a run that has nothing left to do; nothing when it has."""
    total, config = run.resolved.total_steps, run.config
    if state.step < total:
        return
    more = 2 * state.step
    wanted = config.model_copy(update={"steps": more, "tokens": None})
    longer = resolve_schedule(wanted, run.resolved.plan, run.sets.num_train_samples)
    last, following = (_schedule_of(state) or longer).learning_rate(state.step - 1), longer.learning_rate(state.step)
    yield (
        f"nothing to do: the checkpoint is at step {state.step:,} of {total:,}. To go on, give "
        f"{'more --tokens' if config.tokens else f'more --steps, such as --steps {more}'}"
    )
    if abs(following - last) > _SMOOTH * last:
        yield (
            f"with {more:,} steps the {longer.name} schedule runs over all of them: the learning rate goes from "
            f"{last:.2e} to {following:.2e} at step {state.step + 1:,}. --schedule constant --lr {last:.2e} "
            "--warmup-steps 0 goes on at the last one instead"
        )


def _schedule_of(state: RunState) -> Schedule | None:
    if not state.hyperparameters:
        return None
    return Schedule(**{key: state.hyperparameters[flag] for key, flag in _SCHEDULE.items()})  # type: ignore[arg-type]


def _show(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
