"""attempts.jsonl in the run folder: every attempt of `llmscale launch`, where it ran, how far it came, why it ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmscale.files.append import AppendFile
from llmscale.untrusted.documents import load_json_lines

ATTEMPTS_NAME = "attempts.jsonl"
LOGS_NAME = "logs"


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. It is written down when it begins, and again when it has ended."""

    number: int
    """From 1, through all launches of the run."""
    began: str
    """UTC, ISO 8601."""
    hosts: dict[str, int]
    """Ranks by host, in rank order."""
    world_size: int
    master: str
    """address:port where the ranks met."""
    left_out: dict[str, str]
    """Hosts that were not used, and why."""
    starter: str
    logs: str
    """Folder of this attempt's logs, one file per rank."""
    seconds: float | None = None
    """From its beginning to the end of its last process."""
    training_after_s: float | None = None
    """From its beginning to its first finished step; None when there was none."""
    first_step: int | None = None
    """The first step that was finished in this attempt."""
    last_step: int | None = None
    """The last one."""
    end: str | None = None
    """"finished", "stopped", "failed", "hung", "host lost", "user error", "supervisor lost"; None while it runs."""
    reason: str | None = None
    """One line about the end."""


#: Checks the types of a record, and passes over fields of another version.
_ATTEMPT = TypeAdapter(Attempt)


def attempt_logs(run: Path, number: int) -> Path:
    return run / LOGS_NAME / f"attempt-{number:04d}"


def read_attempts(run: Path) -> list[Attempt]:
    """All attempts so far, each as it was last written. A line that is none, cut short by a crash or damaged since, is
    skipped, and so is a file that cannot be read: it explains a run, and must not keep it from going on."""
    attempts: dict[int, Attempt] = {}
    try:
        records = list(load_json_lines(run / ATTEMPTS_NAME))
    except OSError:
        return []
    for record in records:
        try:
            attempt = _ATTEMPT.validate_python(record)
        except ValidationError:
            continue
        attempts[attempt.number] = attempt
    return [attempts[number] for number in sorted(attempts)]


def next_number(run: Path) -> int:
    """For the attempt to come: no logs of an earlier one are written over, even where its line is lost."""
    logs = [path.name.removeprefix("attempt-") for path in (run / LOGS_NAME).glob("attempt-*")]
    numbers = [attempt.number for attempt in read_attempts(run)]
    return max([0, *numbers, *(int(name) for name in logs if name.isascii() and name.isdigit())]) + 1


def write_attempt(run: Path, attempt: Attempt) -> str | None:
    """Append an attempt. Why it could not be written (the disk may be full, and training may go on), else None."""
    problems: list[str] = []
    file = AppendFile(run / ATTEMPTS_NAME, warn=problems.append, unit="attempt")
    file.append(json.dumps(asdict(attempt)).encode() + b"\n", attempt.number)
    file.close()
    return problems[-1] if problems else None
