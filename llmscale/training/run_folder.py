"""The run folder: its files, the claim of one run on it, and the record of a failure. No torch.

--notify: the user's command, which gets a run's facts when it ends, fails or meets a loss spike.

The command runs by `sh -c` as the user gave it, with the variables of the run. Facts are one JSON object on its stdin,
never part of the command: no text of a run is read by a shell. Whatever the command does, the run continues.

Who started the ranks sees how they end, also by SIGKILL: `llmscale launch`, `llmscale train`, else rank 0 itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TextIO

from llmscale import __version__
from llmscale.config.run_keys import last_part, publish_texts
from llmscale.config.user_paths import shown
from llmscale.error_handling import say
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.files.atomic_write import write_durably
from llmscale.files.folder_lock import LOCK_NAME, lock_folder
from llmscale.files.record_log import RecordLog
from llmscale.terminal.human_numbers import with_singulars
from llmscale.untrusted.documents import load_json_lines
from llmscale.untrusted.terminal import make_visible_line

CONFIG_NAME = "config.json"
DS_CONFIG_NAME = "ds_config.json"
STARTS_NAME = "starts.jsonl"
#: Every choice of the newest start, in words.
START_TEXT_NAME = "start.txt"
METRICS_NAME = "metrics.jsonl"
FAILURE_NAME = "failure.json"
ATTEMPTS_NAME = "attempts.jsonl"
LOGS_NAME = "logs"
#: Written by every start to metrics.jsonl; raised whenever older code could misread the file.
METRICS_VERSION = 1
#: Files that a run writes to in its folder.
OWN_FILES = (
    CONFIG_NAME,
    DS_CONFIG_NAME,
    STARTS_NAME,
    START_TEXT_NAME,
    METRICS_NAME,
    LOCK_NAME,
    ".launch.lock",
    ATTEMPTS_NAME,
    FAILURE_NAME,
)
#: Folders that describe what a run was made from: KEPT_NAME and PUBLISHED_NAME of modules that import numpy.
ORIGIN_FOLDERS = ("dataset", "published")
OWN_FOLDERS = ("checkpoints", LOGS_NAME, "profile", "tensorboard", "wandb", *ORIGIN_FOLDERS)
#: Files that a start writes before its first step.
_START_FILES = (CONFIG_NAME, DS_CONFIG_NAME, STARTS_NAME, START_TEXT_NAME, METRICS_NAME, FAILURE_NAME)
#: Libraries whose version can change a result.
LIBRARIES = ("torch", "deepspeed", "mosaicml-streaming", "numpy", "tiktoken", "tokenizers")
#: Time that a network file system may take to show a new file to another host.
_VISIBLE_TRIES = 50
_VISIBLE_PAUSE_S = 0.1
_MAX_ERROR_CHARACTERS = 600
#: Time limit of git: a start does not wait for a large repository on a slow disk.
_GIT_S = 5.0
#: Time limit of the command: what asked a run to stop often kills it half a minute later.
HOOK_S = 20.0
_MAX_ERROR_BYTES = 300


def create_run_folder(run: Path) -> list[Path]:
    """Create the folder, and return the folders that were created, the run's last.

    Raises ConfigError, and then leaves nothing new.
    """
    check_own_files(run)
    made: list[Path] = []
    try:
        for folder in reversed((run, *run.absolute().parents)):
            if not folder.exists():
                folder.mkdir(exist_ok=True)
                made.append(folder)
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(
            f"--run {run} cannot be written to: {error.strerror or error}. Name a folder on a disk with space and "
            "permission."
        ) from None
    return made


def check_own_files(run: Path) -> None:
    """Raise ConfigError if a link or another kind of file has the name of something that a run writes.

    A run folder from a stranger could redirect the writes anywhere. The folder itself may be a link.
    """
    for names, is_right, kind in ((OWN_FILES, stat.S_ISREG, "file"), (OWN_FOLDERS, stat.S_ISDIR, "folder")):
        for path in (run / name for name in names):
            if os.path.lexists(path) and not is_right(path.lstat().st_mode):
                what = "a symbolic link" if path.is_symlink() else f"not a {kind}"
                raise ConfigError(
                    f"--run {run}: {path.name} is {what}, and training would write to it. Put a {kind} in its place, "
                    "or name another --run folder, which may itself be a link to another disk."
                )


def _remove_empty(made: list[Path]) -> None:
    """Remove empty folders; the innermost is the last in the list."""
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()


class RunFolderClaim:
    """One run's claim on its folder, for the process that takes it. A failed start leaves no empty folder."""

    def __init__(self, run: Path, lock_name: str = LOCK_NAME) -> None:
        self._run = run
        self._path = run / lock_name
        self._made: list[Path] = []
        self._lock: TextIO | None = None
        self.before_release: list[Callable[[], object]] = []
        """Called when the claim ends."""

    def take(self) -> str:
        """Create and lock the folder; return the text of the lock file, empty on a full disk. Raises ConfigError."""
        self._made = create_run_folder(self._run)
        self._lock = lock_folder(self._run, self._path.name, named=f"--run {self._run}")
        self._lock.seek(0)
        return self._lock.read()

    def is_visible(self, owner: str) -> bool:
        """Return whether this host sees the folder that another process, `owner`, has taken."""
        # A network file system may show a new file late; listing the folder asks the server again.
        for _ in range(_VISIBLE_TRIES):
            with suppress(OSError):
                os.listdir(self._run)
                if not owner or self._path.read_text() == owner:
                    return True
            time.sleep(_VISIBLE_PAUSE_S)
        return False

    def check(self) -> None:
        """Raise OSError if the folder that this process has taken is not there any more."""
        if self._lock is None:
            return
        if not self._path.exists() or not os.path.samestat(self._path.stat(), os.fstat(self._lock.fileno())):
            raise OSError(f"{self._run} was removed, renamed or replaced during training")

    def give_up(self) -> None:
        """Release the lock of a run that never began; remove its files, and the folders created for it if empty."""
        own = {self._path.name}
        if self._made:
            own |= {*_START_FILES, *ORIGIN_FOLDERS}
        if self._lock and self._run.is_dir() and {path.name for path in self._run.iterdir()} <= own:
            for name in own & {*ORIGIN_FOLDERS}:
                shutil.rmtree(self._run / name, ignore_errors=True)
            for name in own - {*ORIGIN_FOLDERS}:
                (self._run / name).unlink(missing_ok=True)
        self.close()
        _remove_empty(self._made)

    def close(self) -> None:
        """Release the lock, and leave the folder as it is."""
        while self.before_release:
            self.before_release.pop()()
        if self._lock:
            self._lock.close()
        self._lock = None


def save_run_description(
    run: Path,
    config: Mapping[str, object],
    resolved: Mapping[str, object],
    ds_config: Mapping[str, object],
    *,
    is_new: bool,
    launches: Sequence[str] = (),
) -> None:
    """Save the resolved configuration, the ds_config as DeepSpeed gets it, and one line about this start.

    `launches` are the names of the launch on all ranks. For rank 0. Raises ConfigError for a new run; a resumed run
    only prints a warning.
    """

    def write() -> None:
        for name, values in ((CONFIG_NAME, {"config": config, "resolved": resolved}), (DS_CONFIG_NAME, ds_config)):
            write_durably(run / name, json.dumps(values, indent=1) + "\n")

    keep(write, run, "its configuration", is_new=is_new)
    start = {
        "started": _now(),
        "host": platform.node(),
        "world_size": resolved.get("plan", {}).get("world_size"),  # type: ignore[attr-defined]  # a dict by as_dict
        "arguments": _arguments(),
        "launches": list(launches),
        "python": platform.python_version(),
        "llmscale": __version__,
        "versions": library_versions(),
        **working_commit(),
    }
    starts = RecordLog(run / STARTS_NAME, say)
    starts.append(json.dumps(start).encode() + b"\n")
    starts.close()


def working_commit() -> dict[str, object]:
    """Return the git commit of the working folder, and whether its files differ; empty without git or a repository.

    Without `dirty` if that takes too long.
    """

    def git(*words: str) -> str:
        # A repository's own configuration names programs to run.
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_GIT_S, check=True)
        return done.stdout.decode(errors="replace").strip()

    facts: dict[str, object] = {}
    with suppress(OSError, subprocess.SubprocessError):
        facts["commit"] = git("rev-parse", "HEAD")
        words = ("--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        facts["dirty"] = bool(git("status", *words))
    return facts


def open_start_text(run: Path) -> Callable[[str], None]:
    """Remove start.txt of an earlier start, and return a function that appends a line to it.

    Never raises: rank 0 would end alone.
    """
    path = run / START_TEXT_NAME
    with suppress(OSError):
        path.unlink()
    text = RecordLog(path, say)
    return lambda line: text.append(f"{with_singulars(make_visible_line(line))}\n".encode())


def _arguments() -> list[str]:
    """Return this process's arguments without the local rank, which DeepSpeed's launcher adds."""
    return [word for word in sys.argv[1:] if not re.match("--local[-_]rank=", word)]


def repeats_last_start(run: Path, launches: Sequence[str], arguments: Sequence[str] | None = None) -> bool:
    """Return whether the run's last start was of one of these launches, with the same arguments.

    `arguments` are train.py's; default: those of this process.
    """
    path = run / STARTS_NAME
    if path.is_file():
        starts = [*load_json_lines(path)]
    else:
        starts = []
    if starts:
        names = starts[-1].get("launches")
    else:
        names = None
    is_same_launch = isinstance(names, list) and any(launch in names for launch in launches)
    return is_same_launch and starts[-1].get("arguments") == (_arguments() if arguments is None else list(arguments))


def keep(write: Callable[[], None], run: Path, what: str, *, is_new: bool) -> None:
    """Call `write` for a part of the run's description. Raises ConfigError for a new run that cannot be written; a
    resumed run only prints a warning."""
    try:
        write()
    except (OSError, LlmscaleError) as error:
        failed = f"{what} cannot be written to {run}: {getattr(error, 'strerror', None) or error}".rstrip(".")
        if is_new:
            raise ConfigError(f"--run {run}: {failed}. Free some space, or name a folder on another disk.") from None
        say(f"WARNING: {failed}. The folder keeps that of an earlier start, if there is one.")


def library_versions() -> dict[str, str | None]:
    """Return the installed version of each of LIBRARIES, None if it is not installed."""
    return {name: _version(name) for name in LIBRARIES}


@cache
def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def source_hashes(package: Path) -> dict[str, str]:
    """Return the sha256 of every Python file of a package, by its relative path."""
    return {path.relative_to(package).as_posix(): hash_or_reason(path) for path in sorted(package.rglob("*.py"))}


def hash_or_reason(path: Path) -> str:
    """Return the sha256 of a small file, or the reason why it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def record_failure(run_folder: Path, error: BaseException, *, step: int, rank: int) -> None:
    """Write failure.json for `llmscale runs`, unless another rank failed first. Never raises.

    The record stays until training begins again. A rank that was killed writes nothing, but its peers write that they
    lost it. Errors of the start-up are not recorded: they appear where the command was given.
    """
    path = run_folder / FAILURE_NAME
    first_line = str(error).strip().partition("\n")[0].rstrip()
    if isinstance(error, LlmscaleError):
        kind = ""
    else:
        kind = type(error).__name__
    text = ": ".join(filter(None, (kind, first_line)))[:_MAX_ERROR_CHARACTERS]
    with suppress(OSError):
        if not path.exists():
            record = {"error": text, "step": step, "rank": rank, "ended": _now()}
            write_durably(path, json.dumps(record, indent=1) + "\n")


def clear_failure(run_folder: Path) -> None:
    """Remove the record of an earlier start's failure. Never raises."""
    with suppress(OSError):
        (run_folder / FAILURE_NAME).unlink()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def without_nan(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, with None at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [without_nan(inner) for inner in value]
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return value


def notify(command: str | None, run: Path, event: str, facts: Mapping[str, object]) -> None:
    """Run `command`, if there is one, with an event on its stdin, and wait for it. Never raises."""
    if command is None:
        return
    facts = {"event": event, "run": last_part(shown(run)), "host": platform.node(), "time": _now(), **facts}
    text = json.dumps(without_nan(publish_texts(facts)))
    try:
        # Files, because a process that the command leaves in the background would hold pipes open.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(text.encode() + b"\n")
            stdin.seek(0)
            problem = _run(command, stdin.fileno(), stderr.fileno())
            stderr.seek(0)
            last = stderr.read()[-_MAX_ERROR_BYTES:].decode(errors="replace").strip()
    except OSError as error:
        problem = f"cannot be started: {error.strerror or error}"
        last = ""
    if problem:
        say(f"WARNING: --notify {problem}{make_visible_line(f': {last}' if last else '')}")


def _run(command: str, stdin: int, stderr: int) -> str:
    """Return why the command failed, or an empty string. Raises OSError."""
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
    )
    try:
        status = process.wait(HOOK_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"took longer than {HOOK_S:.0f} s and was killed"
    return f"ended with status {status}" if status else ""


def notify_in_background(command: str | None, run: Path, event: str, facts: Mapping[str, object]) -> None:
    """Run `command` while training continues."""
    if command is not None:
        threading.Thread(target=notify, args=(command, run, event, facts), name="notify", daemon=True).start()
