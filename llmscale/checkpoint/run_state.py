"""RunState: everything beside tensors that a run needs to resume, as plain values. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from llmscale.checkpoint.inventory import read_state, read_verified_state
from llmscale.checkpoint.manifest import STATE_NAME, Checkpoint
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, build
from llmscale.untrusted.paths import is_plain_name

#: In older checkpoints, and never read: the optimizer's groups are built from the configuration.
_DROPPED = ("optimizer_groups",)
#: Keys of runs in older checkpoints that this version does not have.
_DROPPED_KEYS = ("record_samples",)


def _check_name(name: str) -> str:
    """Return an id that is safe in paths and on a terminal. Raises ValueError."""
    if not is_plain_name(name):
        raise ValueError("must be a plain name")
    return name


def _check_base(base: dict[str, str]) -> dict[str, str]:
    """Return the description of frozen weights. Raises ValueError."""
    if base and {*base} != {"place", "checksum"}:
        raise ValueError("must have place and checksum")
    return base


_Count = Annotated[int, Field(ge=0)]
#: Numbers as they were written: an integer stays one.
_Numbers = dict[str, int | float]


@dataclass(frozen=True)
class RunState:
    """Plain values of a checkpoint.

    The data position is the number of samples seen. The learning rate and dropout's randomness are functions of the
    step (config/schedule.py, engine/train_step.py), so neither has a state.
    """

    step: _Count
    """Optimizer steps done."""
    samples_seen: _Count
    """Sequences trained on since step 0: the position of the data stream."""
    tokens_seen: _Count
    skipped_steps: _Count
    """Steps that fp16 overflow skipped since step 0."""
    identity: dict[str, object]
    """Values that must not change on resume (training/identity.py)."""
    precision: str
    optimizer_scalars: dict[str, _Numbers]
    """Scalar optimizer states, such as Adam's step count, by optimizer group."""
    loss_scaler: _Numbers | None = None
    """State of fp16's dynamic loss scaler."""
    wandb_run_id: Annotated[str, AfterValidator(_check_name)] | None = None
    config: dict[str, object] = field(default_factory=dict)
    """The run's configuration, for people and for `llmscale checkpoint diff`."""
    hyperparameters: dict[str, object] = field(default_factory=dict)
    """Hyperparameters of the run with all defaults; empty in older checkpoints."""

    base: Annotated[dict[str, str], AfterValidator(_check_base)] = field(default_factory=dict)
    """Frozen weights beside adapters, which the checkpoint does not hold: `place` as --init-from names it, and
    `checksum`."""

    @property
    def saved_order(self) -> Mapping[str, object]:
        """Identity of the sample order, fixed when the run began."""
        order = self.identity.get("order")
        return order if isinstance(order, Mapping) else {}

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class SavedRun(Checkpoint):
    """A checkpoint whose files have their sizes, with its state, whose hash is the manifest's."""

    state: RunState


def read_saved_run(checkpoint: Checkpoint) -> SavedRun:
    """Read a checkpoint's state.

    Raises CheckpointError unless every file is there with its size, and the state with its hash. The tensors' hashes
    are not checked.
    """
    values = read_verified_state(checkpoint)
    return SavedRun(checkpoint.path, checkpoint.manifest, parse_run_state(values, str(checkpoint.path / STATE_NAME)))


def load_run_state(folder: Path) -> RunState:
    """Return the state in a checkpoint's folder. Raises CheckpointError."""
    return parse_run_state(read_state(folder), str(folder / STATE_NAME))


def parse_run_state(values: Mapping[str, object], where: str) -> RunState:
    """Parse the values of RunState.as_dict, which are in the file `where`.

    Raises CheckpointError when a field is missing, unknown or malformed.
    """
    if "engine" in values and "identity" not in values:
        raise CheckpointError(
            f"{where} is of a loop of its own, and not of a run of `llmscale train`: api.Checkpoints continues it, and "
            "api.read_weights reads its weights."
        )
    names = {f.name for f in fields(RunState)}
    values = {key: value for key, value in values.items() if key not in _DROPPED}
    config = values.get("config")
    if isinstance(config, Mapping):
        values["config"] = {key: value for key, value in config.items() if key not in _DROPPED_KEYS}
    if set(values) - names:
        raise CheckpointError(
            f"{where} holds {', '.join(sorted(set(values) - names))}, which this version does not know: "
            "use the llmscale that wrote it."
        )
    return build(RunState, values, Rules(CheckpointError), where)
