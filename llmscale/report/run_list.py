"""List the runs below a folder with their step, loss, state and command. No torch.

Mostly the ends of a run's logs are read, so that a hundred long runs are listed quickly. Run folders are not trusted: a
problem in one is reported in its row.
"""

from __future__ import annotations

import fcntl
import math
import os
import shlex
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from llmscale.checkpoint.manifest import is_count
from llmscale.config.run_config import RunConfig
from llmscale.config.run_keys import last_part, publish_words
from llmscale.config.user_paths import shown, url_of
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.files.folder_lock import LOCK_NAME
from llmscale.report.history import as_number, load_history
from llmscale.training.run_folder import CONFIG_NAME, FAILURE_NAME, METRICS_NAME, STARTS_NAME, notify
from llmscale.untrusted.documents import Rules, load_json, parse_json
from llmscale.untrusted.paths import check_regular, open_regular

State = Literal["running", "finished", "stopped", "failed", "lost", "unreadable"]
#: Files of which a run folder has at least one.
_MARKS = (METRICS_NAME, STARTS_NAME)
#: Bytes to read from a log's end: hundreds of records.
_TAIL_BYTES = 1 << 17
#: Limit of these bytes, where samples and events fill them.
_MOST_TAIL_BYTES = _TAIL_BYTES << 6
#: Limit of the metrics of all runs that are read for their goodput: a few seconds.
_GOODPUT_BYTES = 16 << 20
_MAX_DEPTH = 8
#: Limit of runs in the charts of a report: more curves cannot be told apart.
MOST_RUNS = 64
_RULES = Rules(ConfigError, not_finite=True)
#: Linux's struct flock on 64-bit machines: type, whence, start, length, process.
_FLOCK = "hhqqi0q"


@dataclass(frozen=True)
class ListedRun:
    """One run folder."""

    path: Path
    state: State
    """State; `lost` means that it was killed, or that it runs on a host that cannot be seen from here."""
    step: int | None
    """Last logged step; None before the first."""
    total_steps: int | None
    loss: float | None
    """Loss of the last logged step, nats per token; NaN if it was not finite."""
    last_seen: datetime | None
    """Time of the last write."""
    command: str | None
    """train.py with the arguments of the last start, if recorded."""
    error: str | None
    """Error that ended a failed run."""
    problem: str
    """Parts that could not be read; empty without problems."""
    goodput: float | None = None
    """Share of the wall time that went into steps that count; None if it is unknown or too long to read."""

    def as_dict(self) -> dict[str, object]:
        """Return JSON values."""
        return {
            "run": shown(self.path),
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            # JSON has no NaN.
            "loss": None if self.loss is None or math.isnan(self.loss) else self.loss,
            "goodput": self.goodput,
            "last_seen": self.last_seen.isoformat(timespec="seconds") if self.last_seen else None,
            "command": self.command,
            "error": self.error,
            "problem": self.problem or None,
        }

    def publish(self) -> dict[str, object]:
        """Return JSON values for others, without folders and secrets of this machine."""
        if self.command is None:
            words = None
        else:
            words = shlex.split(self.command)
        if words is None:
            command = None
        else:
            command = shlex.join([words[0], *publish_words(words[1:])])
        return {**self.as_dict(), "run": last_part(shown(self.path)), "command": command}


def find_runs(folder: Path) -> list[ListedRun]:
    """Return all runs at and below `folder`, the newest first. Raises ConfigError when the folder is missing."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Name one with run folders below it (train.py's --run).")
    runs = [read_run(path) for path in _run_folders(folder, _MAX_DEPTH)]
    oldest = datetime.min.replace(tzinfo=timezone.utc)
    runs.sort(key=lambda run: (run.last_seen or oldest, str(run.path)), reverse=True)
    return list(_with_goodput(runs))


def _with_goodput(runs: Sequence[ListedRun]) -> Iterator[ListedRun]:
    """Yield the runs with their goodput, which takes all records: the newest first, up to _GOODPUT_BYTES in all."""
    left_bytes = _GOODPUT_BYTES
    for run in runs:
        goodput = None
        with suppress(OSError, LlmscaleError):
            left_bytes -= check_regular(run.path / METRICS_NAME, follow_links=False).st_size
            if left_bytes >= 0:
                goodput = load_history(run.path).wall_shares().get("steps")
        yield replace(run, goodput=goodput)


def read_run(path: Path) -> ListedRun:
    """Read a run folder; never raises for its contents."""
    problems: list[str] = []
    total_steps = _total_steps(path, problems)
    step, loss, last_event = _progress(path, problems)
    starts = _tail(path / STARTS_NAME, problems, lambda records: True)
    error = _error(path, problems)
    state = _state(path, last_event, error, problems)
    written_ns = [time_ns for time_ns, _ in stamp_run(path)]
    return ListedRun(
        path=path,
        state=state,
        step=step,
        total_steps=total_steps,
        loss=loss,
        last_seen=datetime.fromtimestamp(max(written_ns) / 1e9, timezone.utc) if written_ns else None,
        command=_command(starts[-1]) if starts else None,
        error=error if state == "failed" else None,
        problem="; ".join(problems),
    )


def notify_of_end(config: RunConfig, status: int, error: str | None = None, **more: object) -> None:
    """Run --notify after the ranks have ended with an exit status, with the facts of the run folder. Never raises."""
    if config.notify is None:
        return
    run = read_run(config.run)
    facts = {key: value for key, value in run.publish().items() if key in ("step", "total_steps", "loss", "command")}
    if status:
        event = "failed"
    elif run.state == "finished":
        event = "finished"
    else:
        event = "stopped"
    if status:
        why = f"the ranks ended with status {status}; their output says why"
        facts |= {"error": error or run.error or why, "exit_status": status}
    notify(config.notify, config.run, event, facts | more)


def is_claimed(path: Path) -> bool:
    """Return whether a live process holds the run folder's lock, or held its run in a store.

    It only queries: taking the lock could disturb a run that starts.
    """
    if url_of(path):
        from llmscale.checkpoint.remote_run import is_held  # imports pydantic

        return is_held(path)
    try:
        with open_regular(path / LOCK_NAME, follow_links=False) as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, asked)
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder has a file that only runs write."""
    return any(os.path.lexists(folder / name) for name in _MARKS)


def stamp_run(path: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes with a run's records: time and size of each file that a report reads."""
    stamps = []
    for name in (*_MARKS, CONFIG_NAME, FAILURE_NAME):
        with suppress(OSError):
            status = os.lstat(path / name)
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield run folders; folders inside them are skipped, and links are not followed."""
    if is_run_folder(folder):
        yield folder
        return
    if depth:
        with suppress(OSError), os.scandir(folder) as entries:
            for name in sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)):
                yield from _run_folders(folder / name, depth - 1)


def _total_steps(path: Path, problems: list[str]) -> int | None:
    description = _load(path / CONFIG_NAME, problems)
    if description is None:
        problems.append(f"no {CONFIG_NAME}")
        return None
    resolved = description.get("resolved")
    if isinstance(resolved, dict):
        total = resolved.get("total_steps")
    else:
        total = None
    return total if is_count(total) else None


def _load(path: Path, problems: list[str]) -> Mapping[str, object] | None:
    """Return the object in a file, an empty one if it is damaged, None if it is missing."""
    try:
        return load_json(path, _RULES, path.name)
    except OSError:
        return None
    except LlmscaleError:
        problems.append(f"{path.name} is damaged")
        return {}


def _progress(path: Path, problems: list[str]) -> tuple[int | None, float | None, str]:
    """Return the last step and loss, and the last event, of metrics.jsonl."""
    step = None
    event = ""
    losses = dict[int, float | None]()
    for record in _tail(path / METRICS_NAME, problems, _tells_progress):
        record_step = record.get("step")
        if not is_count(record_step):
            continue
        if record.get("kind") == "train":
            step = record_step
            losses[record_step] = _loss(record.get("loss"))
        elif record.get("kind") == "event" and record.get("event") in ("start", "finished", "stopped"):
            event = str(record["event"])
            # A start from an earlier checkpoint discards later records.
            step = record_step or None
            losses = {at: loss for at, loss in losses.items() if at <= record_step}
    return step, next(reversed(losses.values()), None), event


def _loss(value: object) -> float | None:
    """Return a loss, which metrics.jsonl has as null for NaN and infinity."""
    is_one = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    if is_one:
        return as_number(value)
    return None


def _tells_progress(records: list[dict[str, object]]) -> bool:
    return any(record.get("kind") == "train" or record.get("event") == "start" for record in records)


def _tail(
    path: Path, problems: list[str], is_enough: Callable[[list[dict[str, object]]], bool]
) -> list[dict[str, object]]:
    """Return the JSON objects at a log's end, reading further back until they are enough; other lines are skipped."""
    num_bytes = _TAIL_BYTES
    while True:
        try:
            with open_regular(path, follow_links=False) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - num_bytes))
                lines = file.read(num_bytes).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            problems.append(f"{path.name} cannot be read ({error.strerror})")
            return []
        records = []
        for line in lines[1:] if size > num_bytes else lines:
            with suppress(LlmscaleError):
                records.append(parse_json(line, _RULES, path.name))
        if size <= num_bytes or num_bytes >= _MOST_TAIL_BYTES or (records and is_enough(records)):
            break
        num_bytes *= 4
    if lines and not records:
        problems.append(f"{path.name} is damaged")
    return records


def _error(path: Path, problems: list[str]) -> str | None:
    """Return the error that ended the last start, if one did."""
    failure = _load(path / FAILURE_NAME, problems) or {}
    error = failure.get("error")
    if failure and not isinstance(error, str):
        problems.append(f"{FAILURE_NAME} is damaged")
    return error if isinstance(error, str) else None


def _state(path: Path, last_event: str, error: str | None, problems: list[str]) -> State:
    if is_claimed(path):
        return "running"
    if last_event == "finished":
        return "finished"
    if last_event == "stopped":
        return "stopped"
    if error is not None:
        return "failed"
    return "unreadable" if problems else "lost"


def _command(start: dict[str, object]) -> str | None:
    words = start.get("arguments")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return shlex.join(["train.py", *words])
