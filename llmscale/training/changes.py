"""What a run that resumes tells: changed hyperparameters, a finished run. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from llmscale.checkpoint.manifest import find_damage, load_pieces
from llmscale.checkpoint.run_state import RunState
from llmscale.config.resolve import resolve_schedule
from llmscale.config.run_config import CHANGES_THAT_BREAK, KEYS, place_of
from llmscale.config.run_urls import shown, url_of
from llmscale.config.schedule import Schedule
from llmscale.keys import value_at
from llmscale.training.start import Start

#: Place of the schedule in a Start.
_SCHEDULE = "resolved.schedule."
#: Relative change of the learning rate up to which it counts as continuous.
_SMOOTH = 0.05


def lines_at_end(start: Start) -> list[str]:
    """Return lines on how to continue a run that is finished, and none for one that trains.

    Reads the whole checkpoint of a finished run: a start skips a damaged one, and takes the previous one.
    """
    source, state, run = start.source, start.state, start.config.run
    if source is None or state is None or not start.is_finished:
        return []
    end = f"finished at step {state.step} of {start.resolved.total_steps}; run folder: {shown(run)}"
    is_done = find_damage(source.path, manifest=source.manifest) is None and _is_settled(source.path, run)
    return [*finished_lines(state, start), end] if is_done else []


def _is_settled(checkpoint: Path, run: Path) -> bool:
    """Return whether this disk or the run's store has all of a checkpoint: the ranks need not meet."""
    pieces = load_pieces(checkpoint)
    return pieces.remote is not None if pieces else url_of(run) is None


def hyperparameters(run: Start) -> dict[str, object]:
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


def change_lines(state: RunState, run: Start, now: Mapping[str, object]) -> Iterator[str]:
    """Yield the hyperparameters that differ from the checkpoint's, and a jump of the learning rate."""
    saved = state.hyperparameters
    changed = [f"{key} {_show(saved[key])} -> {_show(value)}" for key, value in now.items()
               if key in saved and saved[key] != value]  # fmt: skip
    changed += _accepted_changes(state.identity, run.identity)
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


def _accepted_changes(saved: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yield the parts of a run's identity that --allow-changed has let differ; of hashes and tables only the name."""
    for key in CHANGES_THAT_BREAK:
        before, after = saved.get(key), now.get(key)
        if key in saved and before != after:
            are_plain = key != "data" and not any(isinstance(value, Mapping) for value in (before, after))
            yield f"{key} {before} -> {after}" if are_plain else key


def finished_lines(state: RunState, run: Start) -> Iterator[str]:
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
