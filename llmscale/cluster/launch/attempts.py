"""The attempts of `llmscale launch`: their record attempts.jsonl, when to try again, and with which arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmscale.checkpoint.inventory import find_checkpoints
from llmscale.config.run_config import RunConfig
from llmscale.files.buffered_log import BufferedLog
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
    file = BufferedLog(run / ATTEMPTS_NAME, warn=problems.append, unit="attempt")
    file.append(json.dumps(asdict(attempt)).encode() + b"\n", attempt.number)
    file.close()
    return problems[-1] if problems else None


#: Before the first restart; doubles with each that brought no new step.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of what is tried."""

    max_restarts: int = 20
    """Over one launch."""
    same_step_limit: int = 3
    """Attempts in a row that end after the same step before the run itself counts as faulty."""


@dataclass(frozen=True)
class Decision:
    """The next action after a failed attempt."""

    wait_s: float = 0.0
    give_up: str | None = None
    """The reason to give up; None to try again after `wait_s`."""


def decide(attempts: Sequence[Attempt], policy: RetryPolicy) -> Decision:
    """After the last of `attempts`, those of this launch, has failed."""
    last = attempts[-1]
    same = 0
    for attempt in reversed(attempts):
        if (attempt.last_step, attempt.end) != (last.last_step, last.end):
            break
        same += 1
    if same >= policy.same_step_limit:
        where = "before its first step" if last.last_step is None else f"after step {last.last_step}"
        return Decision(give_up=f"{same} attempts in a row ended {where} ({last.end}: {last.reason})")
    if len(attempts) > policy.max_restarts:
        return Decision(give_up=f"{policy.max_restarts} restarts were not enough (--max-restarts)")
    return Decision(wait_s=min(FIRST_WAIT_S * 2 ** _fruitless(attempts), LONGEST_WAIT_S))


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """How many attempts at the end have brought no step beyond those before them."""
    furthest, fruitless = -1, 0
    for attempt in attempts:
        reached = -1 if attempt.last_step is None else attempt.last_step
        fruitless = 0 if reached > furthest else fruitless + 1
        furthest = max(furthest, reached)
    return fruitless


#: Each takes one value.
_BEGINNINGS = ("--resume", "--init-from", "--skip-steps")


def restart_arguments(arguments: Sequence[str], config: RunConfig) -> list[str]:
    """`arguments`, which parse to `config`, for a start after they have begun a history that saved a checkpoint."""
    if not begins_somewhere(config):
        return list(arguments)
    kept, value_follows = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if value_follows:
            value_follows = False
        elif name.replace("_", "-") in _BEGINNINGS:
            value_follows = not equals
        else:
            kept.append(word)
    kept += ["--resume", "auto"]
    # A run file may give them.
    kept += [] if config.init_from is None else ["--init-from", "null"]
    return [*kept, "--skip-steps", "[]"] if config.skip_steps else kept


def saved_checkpoints(config: RunConfig) -> set[tuple[int, int]]:
    """(history, step) of what the run has saved: once there is more of it, it has begun. Not looked at where a restart
    needs no other arguments."""
    if not begins_somewhere(config):
        return set()
    return {(saved.history.number, saved.step) for saved in find_checkpoints(config.run).current}


def begins_somewhere(config: RunConfig) -> bool:
    """Return whether the flags start or rewind the run instead of continuing it."""
    return config.resume != "auto" or config.init_from is not None or bool(config.skip_steps)
