"""RunState: everything besides tensors that a run needs to go on, as one object of plain values. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from llmscale.config.run_config import CHANGES_THAT_BREAK
from llmscale.errors import CheckpointError


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says besides its tensors.

    The data position is the number of samples seen. The learning rate and dropout's randomness are functions of
    the step (config/schedule.py, engine/randomness.py), so neither has a state of its own.
    """

    step: int
    """Optimizer steps done."""
    samples_seen: int
    """Sequences trained on since step 0: the position of the data stream."""
    tokens_seen: int
    skipped_steps: int
    """Steps that fp16 overflow skipped since step 0."""
    identity: dict[str, object]
    """What must not change: see CHANGES_THAT_BREAK."""
    precision: str
    optimizer_scalars: dict[str, dict[str, float]]
    """Per optimizer group: states that are one number, such as Adam's step count."""
    optimizer_groups: dict[str, dict[str, object]]
    """Per optimizer group: hyperparameters."""
    loss_scaler: dict[str, float] | None = None
    """Memory of fp16's dynamic loss scaler."""
    wandb_run_id: str | None = None
    config: dict[str, object] = field(default_factory=dict)
    """The run's configuration, for people and for `llmscale checkpoint diff`."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def parse_run_state(values: Mapping[str, object]) -> RunState:
    """The inverse of RunState.as_dict. Raises CheckpointError when a field is missing or unknown."""
    names = {f.name for f in fields(RunState)}
    if set(values) - names:
        raise CheckpointError(
            f"the checkpoint holds {', '.join(sorted(set(values) - names))}, which this version does not know: "
            "use the llmscale that wrote it."
        )
    try:
        return RunState(**values)  # type: ignore[arg-type]  # written by as_dict
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's state is incomplete: {error}.") from None


def check_identity(saved: Mapping[str, object], now: Mapping[str, object], allowed: list[str]) -> list[str]:
    """Compare what defines the sample sequence with the checkpoint's.

    Returns one warning per allowed change. Raises CheckpointError that names every other change with both values, what
    it would break and the flag that accepts it.
    """
    refused: list[str] = []
    warnings: list[str] = []
    for key, breaks in CHANGES_THAT_BREAK.items():
        if saved.get(key) == now.get(key):
            continue
        change = f"{key} was {_short(saved.get(key), now.get(key))} and is {_short(now.get(key), saved.get(key))}"
        (warnings if key in allowed else refused).append(f"{change} ({breaks})")
        if key not in allowed:
            refused[-1] += f"; accept it with --allow-changed {key}"
    if refused:
        raise CheckpointError(f"this is not the run that was saved: {'. '.join(refused)}. Or start a new --run folder.")
    return warnings


def _short(value: object, other: object) -> str:
    """A value for a message; of two mappings only the entries that differ."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return str({key: value[key] for key in value if value[key] != other.get(key)})
    return repr(value)
