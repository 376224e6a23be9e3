"""How a key of a run behaves: declared once, beside its type and default, and read by everything that needs it.

A key of the model is a field of `architecture.shape.GPTShape`, any other one a field of `config.run_config.RunConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Breaks(NamedTuple):
    """A change after a checkpoint that --allow-changed must permit."""

    consequence: str
    """The damage, for messages."""
    under: str = ""
    """Name for --allow-changed where several keys share one; default: the key's own."""
    at: str = ""
    """Place in a Start of the value that may not change; default: the key's own (`place`)."""


class MayDiffer(NamedTuple):
    """Ranks may have different values."""

    why: str


class Condition(NamedTuple):
    """A condition that no word for another key expresses."""

    other: str
    """The flags that the key needs, for the message."""
    is_met: Callable[[Any], object]
    """Function of the run's configuration."""


Resume = Literal["free", "logged", "weights", "refused", "resolved"] | Breaks
Ranks = Literal["same", "resolved"] | MayDiffer
Command = Literal["estimate", "plan"]
Outside = Literal["value", "name", "private"]


@dataclass(frozen=True)
class Key:
    """Behaviour of one key."""

    resume: Resume
    """Treatment of a value that differs from the checkpoint's. free: none, because no step depends on it. logged:
    the log names both values. weights: both that and a refusal, because the saved tensors fit one value. refused: by a
    rule of its own. resolved: its consequences are reported or refused."""
    ranks: Ranks
    """Treatment of a value that differs between ranks. same: refusal. resolved: refusal if its consequences differ:
    the resolved run, the ds_config, or the content of a file."""
    needs: tuple[str | Condition, ...] = ()
    """Conditions without which it has no effect: `KEY`, `KEY=VALUE`, `KEY or KEY`, `not KEY`, `not KEY=VALUE`."""
    needs_of_model: str = ""
    """Key of the model without which it has no effect."""
    in_place_of: str = ""
    """Key for the same quantity in another unit. A flag for either overrides the file's entries for both."""
    place: str = ""
    """Place in a Start of the resolved value; default: the field of this name of its shape, schedule, plan or
    ranks, else the key in its configuration."""
    asked_by: tuple[Command, ...] = ()
    """Commands besides `train` that have this flag."""
    asked_default: str = ""
    """Its default in these commands, for their help; default: the key's own."""
    by_ladder: bool = False
    """Each run of a ladder has its own value."""
    off: object = None
    """Value under a flag that the key may not be given with; default: its default."""
    begins: bool = False
    """True if it decides where a run begins; a restart leaves it out."""
    outside: Outside | None = None
    """Part of a text that leaves the machine, in model cards, reports, trackers and messages. value: all of it. name:
    the last part of a path or URL. private: nothing. Numbers and words of a list leave it as they are."""
    metavar: str = ""
    """Name of the value in help; default: from the type."""
    usual: bool = False
    """True if `train --help` shows it; `--help all` shows every key."""
    of_model: Literal["", "size", "block", "experts", "training"] = ""
    """Kind of a field of GPTShape. size: the runs of a ladder differ in it. experts: without effect in a model that has
    none. training: in no config.json."""
    may_contradict: bool = False
    """True if a model's key may differ from the config.json of the published weights that a run begins with."""
    run_default: object = None
    """Default of a model's key in a run; None: the preset's value."""
    bounds: tuple[tuple[str, float], ...] = ()
    """Legal values of a model's key in a run, as pydantic's ge, gt, le and lt."""

    def __call__(self, _schema: object) -> None:
        """Add nothing to the JSON schema of the key, whose `json_schema_extra` this object is."""


def value_at(place: str, run: object) -> object:
    """Return the attribute or entry of `run` at a path such as `resolved.schedule.lr`."""
    value = run
    for part in place.split("."):
        if isinstance(value, Mapping):
            value = value[part]
        else:
            value = getattr(value, part)
    return value
