"""EngineState: everything beside tensors that an engine of any module needs to continue, as plain values. No torch.

`state.json` of a loop's own checkpoint is {"engine": {...}}. That of `llmscale train` has further facts of a run, and
the engine's among them (run_state.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, cast

from pydantic import Field

from llmscale.checkpoint.inventory import read_verified_state
from llmscale.checkpoint.manifest import STATE_NAME, Checkpoint
from llmscale.checkpoint.plain_values import from_json, to_json
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, build

#: Key of the state in `state.json`.
ENGINE = "engine"
#: A key that only `llmscale train` writes.
_OF_TRAIN = "identity"

_Count = Annotated[int, Field(ge=0)]
#: Numbers as they were written: an integer stays one.
_Numbers = dict[str, int | float]


@dataclass(frozen=True)
class GroupState:
    """One parameter group of an optimizer."""

    name: str
    parameters: tuple[str, ...]
    """Names of its parameters in the module, in the group's order."""
    settings: dict[str, object]
    """Learning rate, betas and the like, as plain values."""


@dataclass(frozen=True)
class EngineState:
    """Plain values of an engine after a step."""

    step: _Count
    """Optimizer steps done, as the loop counts them."""
    precision: str
    """bf16, fp16 or fp32."""
    optimizer_scalars: dict[str, _Numbers]
    """Scalar optimizer states, such as Adam's step count, by optimizer group."""
    groups: tuple[GroupState, ...]
    shapes: dict[str, tuple[_Count, ...]]
    """Shape of every parameter and buffer by its name in the module; tied ones once."""
    tied: dict[str, str] = field(default_factory=dict)
    """Further names of tied parameters and buffers, each with the name in `shapes`."""
    scheduler: dict[str, object] | None = None
    """State of the engine's learning-rate scheduler."""
    loss_scaler: _Numbers | None = None
    """State of fp16's dynamic loss scaler."""
    skipped_steps: _Count = 0
    """Steps that fp16 overflow skipped."""
    global_steps: _Count = 0
    """Steps that the engine has counted, skipped ones included."""
    global_samples: _Count = 0
    """Samples that the engine has counted."""
    train_batch_size: _Count = 0
    """Samples of a step over all ranks."""
    has_frozen: bool = True
    """False if parameters that the optimizer does not change were left out."""
    extra: dict[str, object] = field(default_factory=dict)
    """Values of the loop's own."""

    def as_dict(self) -> dict[str, object]:
        """Return the content of state.json. Raises CheckpointError for values that are not plain."""
        values = {entry: getattr(self, entry) for entry in self.__dataclass_fields__}
        values["groups"] = [
            {
                "name": group.name,
                "parameters": list(group.parameters),
                "settings": to_json(group.settings, f"settings of the optimizer's {group.name}"),
            }
            for group in self.groups
        ]
        values["shapes"] = {name: list(shape) for name, shape in self.shapes.items()}
        values["scheduler"] = to_json(self.scheduler, "the state of the learning-rate scheduler")
        values["extra"] = to_json(self.extra, "extra")
        return {ENGINE: values}


def read_engine_state(checkpoint: Checkpoint) -> EngineState:
    """Read the state of a loop's own checkpoint.

    Raises CheckpointError unless every file is there with its size, and the state with its hash.
    """
    return parse_engine_state(read_verified_state(checkpoint), checkpoint)


def parse_engine_state(values: Mapping[str, object], checkpoint: Checkpoint) -> EngineState:
    """Parse the content of a checkpoint's state.json. Raises CheckpointError."""
    where = str(checkpoint.path / STATE_NAME)
    if _OF_TRAIN in values:
        raise CheckpointError(
            f"{checkpoint.path} is of a run of `llmscale train`, and not of a loop of its own. `llmscale train` "
            "continues it, and api.load_run opens its model."
        )
    body = values.get(ENGINE)
    if not isinstance(body, dict):
        raise CheckpointError(f"{where} has no '{ENGINE}': it is damaged, or of another version.")
    unknown = sorted(body.keys() - EngineState.__dataclass_fields__.keys())
    if unknown:
        raise CheckpointError(
            f"{where} holds {', '.join(unknown)[:200]}, which this version does not know: use the llmscale that wrote "
            "it."
        )
    state = build(EngineState, body, Rules(CheckpointError), where)
    groups = [GroupState(group.name, group.parameters, _mapping(group.settings)) for group in state.groups]
    return replace(
        state,
        groups=tuple(groups),
        scheduler=None if state.scheduler is None else _mapping(state.scheduler),
        extra=_mapping(state.extra),
    )


def _mapping(value: object) -> dict[str, object]:
    """Return a decoded mapping. Raises CheckpointError for anything else."""
    decoded = from_json(value)
    if not isinstance(decoded, dict):
        raise CheckpointError("a saved value is damaged: a mapping was expected.")
    return cast("dict[str, object]", decoded)
