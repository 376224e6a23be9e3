"""attempts.jsonl in the run folder: every attempt of `llmscale launch`, where it ran, how far it came, why it ended."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

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


def attempt_logs(run: Path, number: int) -> Path:
    return run / LOGS_NAME / f"attempt-{number:04d}"


def read_attempts(run: Path) -> list[Attempt]:
    """All attempts so far, each as it was last written. A line that a crash cut short is skipped."""
    attempts: dict[int, Attempt] = {}
    known = {field.name for field in fields(Attempt)}
    path = run / ATTEMPTS_NAME
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            attempt = Attempt(**{key: value for key, value in json.loads(line).items() if key in known})
        except (ValueError, TypeError, AttributeError):
            continue
        attempts[attempt.number] = attempt
    return [attempts[number] for number in sorted(attempts)]


def write_attempt(run: Path, attempt: Attempt) -> str | None:
    """Append an attempt. Why it could not be written (the disk may be full, and training may go on), else None."""
    try:
        with (run / ATTEMPTS_NAME).open("a+b") as file:
            # After a line that a crash cut short: begin a new one.
            if file.tell() and _last_byte(file.fileno()) != b"\n":
                file.write(b"\n")
            file.write(json.dumps(asdict(attempt)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{run / ATTEMPTS_NAME}: {error.strerror}"
    return None


def _last_byte(descriptor: int) -> bytes:
    return os.pread(descriptor, 1, os.fstat(descriptor).st_size - 1)
