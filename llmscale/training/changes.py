"""What a continued run does differently from the one that was saved, and how to go on with a finished one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import cast

from llmscale.architecture.shape import SHAPE_KEYS
from llmscale.checkpoint.run_state import RunState
from llmscale.config.resolve import resolve_schedule
from llmscale.config.schedule import Schedule
from llmscale.training.run_inputs import PreparedRun, as_plain

#: Of the configuration: what decides how steps are made and follows from nothing else.
_KEYS = (
    *("optimizer", "muon_lr_factor", "weight_decay", "beta1", "beta2", "eps"),
    *("document_mask", "loss_chunk_tokens", "z_loss", "keep_zeros"),
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
#: Learning rates nearer to each other than this are one that goes on.
_SMOOTH = 0.05


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
