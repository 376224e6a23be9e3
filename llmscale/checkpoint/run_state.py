"""RunState: everything beside tensors that a run needs to resume, as plain values. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, cast

import xxhash
from pydantic import AfterValidator, Field

from llmscale.checkpoint.inventory import read_state
from llmscale.checkpoint.manifest import STATE_NAME, Checkpoint
from llmscale.config.run_config import CHANGES_THAT_BREAK
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import MAX_BYTES, Rules, build, parse_json
from llmscale.untrusted.paths import is_plain_name, read_regular, unreadable_as


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
    """Values that must not change on resume: CHANGES_THAT_BREAK."""
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
    folder, manifest = checkpoint.path, checkpoint.manifest
    if not checkpoint.is_whole():
        raise CheckpointError(f"{folder} lacks a part of a file.")
    path = folder / STATE_NAME
    with unreadable_as(CheckpointError, path):
        contents = read_regular(path, MAX_BYTES, follow_links=False)
    hashes = {file.name: file.xxh3_128 for file in manifest.files}
    if hashes.get(STATE_NAME) not in (None, xxhash.xxh3_128(contents).hexdigest()):
        raise CheckpointError(f"{path} does not match its hash: its content was altered.")
    values = parse_json(contents, Rules(CheckpointError, follow_links=False, not_finite=True), str(path))
    return SavedRun(folder, manifest, parse_run_state(values, str(path)))


def load_run_state(folder: Path) -> RunState:
    """Return the state in a checkpoint's folder. Raises CheckpointError."""
    return parse_run_state(read_state(folder), str(folder / STATE_NAME))


def parse_run_state(values: Mapping[str, object], where: str) -> RunState:
    """Parse the values of RunState.as_dict, which are in the file `where`.

    Raises CheckpointError when a field is missing, unknown or malformed.
    """
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


#: In older checkpoints, and never read: the optimizer's groups are built from the configuration.
_DROPPED = ("optimizer_groups",)
#: Keys of runs in older checkpoints that this version does not have.
_DROPPED_KEYS = ("record_samples",)


def check_identity(saved: Mapping[str, object], now: Mapping[str, object], allowed: list[str]) -> list[str]:
    """Compare the values that define the sample sequence with the checkpoint's.

    Returns one warning per allowed change. Raises CheckpointError with every other change: both values, the
    consequence, and the flag that accepts it.
    """
    refused: list[str] = []
    warnings: list[str] = []
    for key, breaks in CHANGES_THAT_BREAK.items():
        before, after = saved.get(key), now.get(key)
        # A mixture's order follows from its datasets.
        is_mix = any(isinstance(order, Mapping) and "sets" in order for order in (before, after))
        if before == after or (key == "order" and is_mix and saved.get("data") != now.get("data")):
            continue
        was, is_now = repr(_difference(before, after)), repr(_difference(after, before))
        if key == "data" and isinstance(saved.get("sets"), Mapping):
            was, is_now = _show_sets(saved, now), _show_sets(now, saved)
            is_now += ", prepared again since" if was == is_now else ""
        change = f"{key} was {was} and is {is_now}"
        (warnings if key in allowed else refused).append(f"{change} ({breaks})")
        if key not in allowed:
            refused[-1] += f"; accept it with --allow-changed {key}"
    if refused:
        raise CheckpointError(f"this is not the run that was saved: {'. '.join(refused)}. Or start a new --run folder.")
    return warnings


def _show_sets(identity: Mapping[str, object], other: Mapping[str, object]) -> str:
    """Return the datasets of one identity, by name and path, whose content differs in the other one."""
    tables = (cast("Mapping[str, object]", one["sets"]) for one in (identity, other))
    own, others = ({name: entry if isinstance(entry, Mapping) else {} for name, entry in of.items()} for of in tables)
    differ = [name for name in own if own[name].get("fingerprint") != others.get(name, {}).get("fingerprint")]
    if differ:
        return ", ".join(f"{f'{name} in ' if name else ''}{own[name].get('data')}" for name in differ)
    left_out = [name for name in others if name not in own]
    return f"without {', '.join(left_out)}" if left_out else f"in the order {', '.join(own)}"


def _difference(value: object, other: object) -> object:
    """Return a value for a message, reduced to the differing entries (at any depth) if both are mappings."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return {key: _difference(value[key], other.get(key)) for key in value if value[key] != other.get(key)}
    return value
