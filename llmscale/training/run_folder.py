"""The run folder: everything that is needed to resume, to explain or to hand over a run. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TextIO

from llmscale import __version__
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.files.atomic_write import write_durably
from llmscale.files.buffered_log import BufferedLog, warn_on_stderr
from llmscale.untrusted.paths import open_own

CONFIG_NAME = "config.json"
DS_CONFIG_NAME = "ds_config.json"
STARTS_NAME = "starts.jsonl"
METRICS_NAME = "metrics.jsonl"
#: Raised whenever older code could misread metrics.jsonl; every start writes it there.
METRICS_VERSION = 1
LOCK_NAME = ".lock"
#: What a run writes to in its folder.
OWN_FILES = (
    *(CONFIG_NAME, DS_CONFIG_NAME, STARTS_NAME, METRICS_NAME, LOCK_NAME),
    *(".launch.lock", "attempts.jsonl", "failure.json"),
)
#: Folders of a run that describe what it was made from: KEPT_NAME and PUBLISHED_NAME of modules that import numpy.
ORIGIN_FOLDERS = ("dataset", "published")
OWN_FOLDERS = ("checkpoints", "logs", "profile", "samples", "tensorboard", "wandb", ".agents", *ORIGIN_FOLDERS)
#: Libraries whose version can change a result.
LIBRARIES = ("torch", "deepspeed", "mosaicml-streaming", "numpy", "tiktoken", "tokenizers")
#: What a new run folder must have room for: the description of the run.
_PROBE_BYTES = 1 << 16


def create_run_folder(run: Path) -> list[Path]:
    """Make the folder, and see that it can be written to. Returns the folders that were made for it, it last.

    Raises ConfigError; then there is nothing that was not there before.
    """
    check_own_files(run)
    made: list[Path] = []
    probe = run / f".writable-{os.getpid()}"
    try:
        for folder in reversed((run, *run.absolute().parents)):
            if not folder.exists():
                folder.mkdir(exist_ok=True)
                made.append(folder)
        # A run that goes on is not refused for want of space: it may be there when the next checkpoint is due.
        probe.unlink(missing_ok=True)
        with open(open_own(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(b"" if (run / CONFIG_NAME).exists() else bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        remove_folders(made)
        raise ConfigError(
            f"--run {run} cannot be written to: {error.strerror or error}. Name a folder on a disk with space and "
            "permission."
        ) from None
    return made


def check_own_files(run: Path) -> None:
    """Raise ConfigError where a link or another kind of file stands in the place of what a run writes.

    A run folder that somebody else has packed could lead the writing anywhere. The folder itself may be a link.
    """
    for names, is_right, kind in ((OWN_FILES, stat.S_ISREG, "file"), (OWN_FOLDERS, stat.S_ISDIR, "folder")):
        for path in (run / name for name in names):
            with suppress(OSError):
                if not is_right(path.lstat().st_mode):
                    what = "a symbolic link" if path.is_symlink() else f"not a {kind}"
                    raise ConfigError(
                        f"--run {run}: {path.name} is {what}, and training would write to it. Put a {kind} in its "
                        "place, or name another --run folder, which may itself be a link to another disk."
                    )


def remove_folders(made: list[Path]) -> None:
    """Take away folders, the innermost last in the list, that are empty."""
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()


def lock_run_folder(run: Path, name: str = LOCK_NAME) -> TextIO:
    """Claim the folder for this process for as long as the returned file stays open; death releases it too.

    A POSIX record lock: forked data workers do not inherit it, and network file systems know it. Raises ConfigError
    when another process holds it (two runs in one folder would overwrite each other's checkpoints), or when the file
    cannot be made.
    """
    path = run / name
    try:
        while True:
            file = os.fdopen(_open_for_owner(path), "a+")
            if not _lock(file):
                file.seek(0)
                owner = file.read().strip() or "another process"
                file.close()
                raise ConfigError(
                    f"--run {run} is in use by {owner}. Wait for it to end, or name another folder."
                ) from None
            if _is_same_file(file, path):
                break
            # Its last owner removed it between our opening and our locking it.
            file.close()
    except OSError as error:
        raise ConfigError(f"--run {run}: {path.name} cannot be written: {error.strerror or error}.") from None
    with suppress(OSError):  # a full disk has no room for a name, but for a lock it has
        os.ftruncate(file.fileno(), 0)
        # Not into the file's buffer, which its end would try to write once more.
        os.write(file.fileno(), f"process {os.getpid()} on host {platform.node()}\n".encode())
    return file


def _lock(file: TextIO) -> bool:
    """False when another process holds it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    except OSError:
        # A file system without locks: nothing to claim, and no reason not to train.
        pass
    return True


def _is_same_file(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open_for_owner(path: Path) -> int:
    """Open a lock file that only its owner may read: who can read a file can lock it."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with suppress(PermissionError):
        os.fchmod(descriptor, 0o600)
    return descriptor


def save_run_description(
    run: Path,
    config: Mapping[str, object],
    resolved: Mapping[str, object],
    ds_config: Mapping[str, object],
    *,
    is_new: bool,
) -> None:
    """Save the resolved configuration, what DeepSpeed really got, and one line about this start. Main rank only.

    A run that `is_new` must be able to say what it is: raises ConfigError. One that goes on only warns.
    """

    def write() -> None:
        _write_json(run / CONFIG_NAME, {"config": config, "resolved": resolved})
        _write_json(run / DS_CONFIG_NAME, ds_config)

    keep(write, run, "its configuration", is_new=is_new)
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "world_size": resolved.get("plan", {}).get("world_size"),  # type: ignore[attr-defined]  # a dict by as_dict
        # Of this process: DeepSpeed's launcher adds the rank's number.
        "arguments": [word for word in sys.argv[1:] if not re.match("--local[-_]rank=", word)],
        "python": platform.python_version(),
        "llmscale": __version__,
        "versions": library_versions(),
    }
    starts = BufferedLog(run / STARTS_NAME, unit="start")
    starts.append(json.dumps(start).encode() + b"\n", 0)
    starts.close()


def keep(write: Callable[[], None], run: Path, what: str, *, is_new: bool) -> None:
    """Write a part of the description of a run to its folder. Raises ConfigError when it cannot be written, or for a
    run that is not new prints a warning."""
    try:
        write()
    except (OSError, LlmscaleError) as error:
        failed = f"{what} cannot be written to {run}: {getattr(error, 'strerror', None) or error}".rstrip(".")
        if is_new:
            raise ConfigError(f"--run {run}: {failed}. Free some space, or name a folder on another disk.") from None
        warn_on_stderr(f"WARNING: {failed}. The folder keeps that of an earlier start, if there is one.")


def library_versions() -> dict[str, str | None]:
    """Versions of LIBRARIES as they are installed, None for what is not."""
    return {name: _version(name) for name in LIBRARIES}


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    write_durably(path, json.dumps(values, indent=1) + "\n")


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
