"""What a cluster must be told: the YAML of `--executor-options`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_yaml

ExecutorName = Literal["slurm", "ray"]
#: What stands on a line of an sbatch script as it is.
_PLAIN = re.compile(r"[\w.,:;@%+/=()\[\]&|*-]+")
_FLAG = re.compile(r"[a-z][a-z-]*")


@dataclass(frozen=True)
class SlurmSettings:
    """Of every job."""

    partition: str = ""
    """The cluster's default, if empty."""
    time_hours: float = 0.0
    """A task's limit; the partition's own, if 0."""
    memory_gb: int = 4
    """Of a task, which has one core."""
    account: str = ""
    qos: str = ""
    setup: str = ""
    """Shell commands of a job before anything else, such as `module load python`."""
    max_array_size: int = 1001
    """Slurm's MaxArraySize."""
    sbatch: Mapping[str, str] = field(default_factory=dict)
    """Other flags of sbatch, without their dashes."""


@dataclass(frozen=True)
class RaySettings:
    """Of every task."""

    address: str = ""
    """HOST:PORT of the cluster; RAY_ADDRESS or one that runs on this machine, if empty."""
    memory_gb: int = 4
    """Of a task, which has one core."""


@dataclass(frozen=True)
class Cluster:
    """Many machines that share a disk."""

    settings: SlurmSettings | RaySettings
    tasks: int | None = None
    """Parts of the input; None leaves the number to its files."""
    at_once: int | None = None
    """Tasks that run at the same time; None for as many as there is room for."""

    @property
    def executor(self) -> ExecutorName:
        return "slurm" if isinstance(self.settings, SlurmSettings) else "ray"


def read_settings(executor: ExecutorName, path: Path | None) -> SlurmSettings | RaySettings:
    """Raises DataError, which names the file, the key and what is legal."""
    kind: type[SlurmSettings] | type[RaySettings] = SlurmSettings if executor == "slurm" else RaySettings
    if path is None:
        return kind()
    where = f"--executor-options {path}"
    try:
        values = load_yaml(path, Rules(DataError, max_bytes=CONFIG_MAX_BYTES), where)
    except OSError as error:
        raise DataError(f"{where}: {error.strerror}.") from None
    legal = {name: getattr(kind(), name) for name in kind.__dataclass_fields__}
    for key, value in values.items():
        if key not in legal:
            raise DataError(
                f"{where}: --executor {executor} has no option '{str(key)[:80]}'.{did_you_mean(str(key), legal)} "
                f"Legal: {', '.join(legal)}."
            )
        _check_value(where, key, value, legal[key])
    return kind(**values)  # type: ignore[arg-type]  # checked above


def _check_value(where: str, key: str, value: object, default: object) -> None:
    """Raises DataError for a value of another kind than the default, or that an sbatch script cannot hold."""
    if isinstance(default, Mapping):
        fits = isinstance(value, Mapping) and all(
            _FLAG.fullmatch(str(flag)) and isinstance(text, (str, int)) and _PLAIN.fullmatch(str(text))
            for flag, text in value.items()
        )
        legal = "flags of sbatch without dashes, and words, such as {constraint: cpu}"
    elif isinstance(default, str):
        fits = isinstance(value, str) and (key == "setup" or bool(_PLAIN.fullmatch(value)))
        legal = "a text" if key == "setup" else "a word (in quotes where it is a number)"
    else:
        kinds = (int,) if isinstance(default, int) else (int, float)
        # YAML takes 12:00:00 for 43200.
        most = 1_000_000 if isinstance(default, int) else 1000
        fits = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value <= most
        legal = f"a {'whole ' if isinstance(default, int) else ''}number above 0 and at most {most:,}"
    if not fits:
        raise DataError(f"{where}: {key} is {str(value)[:80]!r}, and must be {legal}.")
