"""`--record-samples`: record which samples each step consumed, surviving any crash. NumPy only.

Every start of a run is a session. Each rank appends to `samples/session-0002/rank-00003.bin`, one record per step,
written after the step. `session.json` beside it has the session's history, as in a checkpoint
(checkpoint/inventory.py); the last session's branches lead to the steps that count. Within a history, a session that
starts at step s supersedes earlier records of steps >= s. Each sample takes four bytes.

A full disk does not end training. The record's head then names the first missing step, which needs no disk space.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.permutation import mix64
from llmscale.errors import ConfigError, DataError
from llmscale.files.atomic_write import write_durably
from llmscale.files.buffered_log import BufferedLog, warn_on_stderr
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import open_own, open_regular

FOLDER = "samples"
_MAGIC = b"LLMSIDS2"
# File: magic, start step, world size, first missing step or -1. Record: step, number of ids, CRC-32 of (step, number,
# ids); then the ids.
_FILE_HEAD = struct.Struct("<8sqqq")
_MISSING_AT = struct.calcsize("<8sqq")
_RECORD_HEAD = struct.Struct("<qII")
_NONE_MISSING = -1
_SESSION = re.compile(r"session-(\d+)$")
_SESSION_FILE = "session.json"


def ids_checksum(sample_ids: NDArray[np.int64]) -> int:
    """Order-independent checksum, an int64 that adds up over ranks (modulo 2^64) to the batch's.

    A sum of mixed ids: a wrong, missing or repeated id goes unnoticed with probability 2^-64.
    """
    total = mix64(np.asarray(sample_ids).astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64)
    return int(total.astype(np.int64))


def next_session(run_folder: Path) -> int:
    """Return the number of a new session. One rank calls this and broadcasts it."""
    return max(_sessions(run_folder), default=-1) + 1


def begin_session(run_folder: Path, start_step: int, history: Mapping[str, object], *, records: bool) -> int:
    """Write which history a session continues (`history`: its number and branches) and whether it `records`; otherwise
    it is a gap in earlier records. Return the session's number. Raises ConfigError."""
    number = next_session(run_folder)
    folder = run_folder / FOLDER / f"session-{number:04d}"
    if records or folder.parent.is_dir():
        try:
            folder.mkdir(parents=True)
            write_durably(folder / _SESSION_FILE, json.dumps({**history, "start_step": start_step, "records": records}))
        except OSError as error:
            if records:
                raise _cannot_begin(folder, error) from None
            warn_on_stderr(f"WARNING: {_cannot_begin(folder, error)}")
    return number


class SampleRecorder:
    """Records one rank's ids per step. Step s is global batch s of the stream, from 0.

    Raises ConfigError when the record cannot be created; later write errors are survived.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        session: int,
        rank: int,
        world_size: int,
        start_step: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises OSError while another run owns the folder."""
        folder = run_folder / FOLDER / f"session-{session:04d}"
        path = folder / f"rank-{rank:05d}.bin"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0) as file:
                head = _FILE_HEAD.pack(_MAGIC, start_step, world_size, _NONE_MISSING)
                if file.write(head) != len(head):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except FileExistsError:
            raise DataError(f"{path} exists: every start of a run needs its own session number.") from None
        except OSError as error:
            raise _cannot_begin(path, error) from None

        def check_place() -> None:
            check()
            path.stat()  # records are unreadable without the head, so a removed file is not created again

        self._file = BufferedLog(path, are_lines=False, check=check_place)
        self._missing = _NONE_MISSING
        self._pending: list[NDArray[np.int64]] = []

    def add(self, sample_ids: NDArray[np.int64]) -> None:
        """Add the ids of one micro-batch."""
        self._pending.append(np.asarray(sample_ids, np.int64))

    def end_step(self, step: int) -> int:
        """Write the ids added since the last step as those of `step`, and return their checksum."""
        ids = np.concatenate(self._pending) if self._pending else np.empty(0, np.int64)
        self._pending.clear()
        if ids.size and ids.max() >= 1 << 32:
            raise DataError(f"Sample id {ids.max()} does not fit the record's four bytes.")
        body = np.sort(ids).astype("<u4").tobytes()
        crc = zlib.crc32(body, zlib.crc32(struct.pack("<qI", step, len(ids))))
        self._file.append(_RECORD_HEAD.pack(step, len(ids), crc) + body, step)
        self._note_missing()
        return ids_checksum(ids)

    def close(self) -> None:
        """Make the record durable, and warn when steps are missing."""
        self._file.close()
        self._note_missing()

    def _note_missing(self) -> None:
        """Update the first missing step in the head. If that fails, the next session's start shows the gap."""
        missing = self._file.first_missing
        missing = _NONE_MISSING if missing is None else missing
        if missing != self._missing and self._file.overwrite(_MISSING_AT, struct.pack("<q", missing)):
            self._missing = missing


def _cannot_begin(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--record-samples: {path} cannot be written: {error.strerror or error}. Free some space, or start without the "
        "flag."
    )


@dataclass(frozen=True)
class Recorded:
    """Recorded samples of a run."""

    steps: dict[int, NDArray[np.int64]]
    """Sorted ids of each step's global batch in the current history, steps ascending."""
    gaps: tuple[str, ...]
    """Texts that name missing steps after the first recorded one."""


def load_recorded(run_folder: Path) -> dict[int, NDArray[np.int64]]:
    """Return the sorted ids of each step's global batch in the current history, steps ascending.

    Steps that not every rank recorded were never finished and are skipped, as are torn records. Raises DataError for
    malformed files and for gaps.
    """
    recorded = read_recorded(run_folder)
    if recorded.gaps:
        raise DataError(
            f"{run_folder / FOLDER} is incomplete, because the disk was full or --record-samples was not given. "
            f"Missing: {'; '.join(recorded.gaps)}."
        )
    return recorded.steps


def read_recorded(run_folder: Path) -> Recorded:
    """Return the recorded steps of the current history and the missing ones. Raises DataError for malformed files."""
    sessions = [session for _, folder in sorted(_sessions(run_folder).items()) if (session := _load_session(folder))]
    if not sessions:
        return Recorded({}, ())
    # History numbers only grow, so sessions are in the order of the steps that count.
    end_of = {**dict(sessions[-1].branches), sessions[-1].history: math.inf}
    sessions = [session for session in sessions if session.history in end_of]
    begin = min(session.start_step for session in sessions)
    history: dict[int, NDArray[np.int64]] = {}
    unknown_from: int | None = None
    for session in sessions:
        start, end = session.start_step, end_of[session.history]
        history = {step: ids for step, ids in history.items() if step < start}
        history.update({step: ids for step, ids in session.steps.items() if step < end})
        if unknown_from is not None and unknown_from >= start:
            unknown_from = None
        # This session's gap begins here; later sessions may have recorded those steps.
        missing = session.first_missing
        if missing is not None and missing < end and missing not in history:
            unknown_from = missing if unknown_from is None else min(unknown_from, missing)
    gaps = [_words(first, last) for first, last in _holes([begin - 1, *history])]
    if unknown_from is not None and unknown_from > max(history, default=begin - 1):
        gaps.append(f"step {unknown_from} and all later steps")
    return Recorded(dict(sorted(history.items())), tuple(gaps))


def _holes(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of missing steps."""
    for before, after in itertools.pairwise(sorted(steps)):
        if after > before + 1:
            yield before + 1, after - 1


def _words(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _sessions(run_folder: Path) -> dict[int, Path]:
    matches = ((path, _SESSION.match(path.name)) for path in (run_folder / FOLDER).glob("session-*"))
    return {int(match.group(1)): path for path, match in matches if match}


@dataclass(frozen=True)
class _Session:
    start_step: int
    steps: dict[int, NDArray[np.int64]]
    """Sorted ids of the steps that all ranks finished."""
    first_missing: int | None
    """First step that some rank could not record."""
    history: int = 1
    branches: tuple[tuple[int, int], ...] = ()
    """(history, steps done) at which each history before this one was left."""


def _load_session(folder: Path) -> _Session | None:
    """Return a session; None if it was killed before its first record."""
    session = _read_session(folder)
    parts: dict[int, list[NDArray[np.int64]]] = {}
    heads, missing = set(), []
    for path in sorted(folder.glob("rank-*.bin")):
        try:
            with open_regular(path) as file:
                contents = file.read()
        except OSError as error:
            raise DataError(f"Cannot read {path}: {error.strerror}.") from None
        if len(contents) < _FILE_HEAD.size:
            continue  # killed before the head was written
        magic, start_step, world_size, first_missing = _FILE_HEAD.unpack_from(contents)
        if magic != _MAGIC:
            raise DataError(f"{path} is not a sample record.")
        heads.add((start_step, world_size))
        missing += [first_missing] if first_missing != _NONE_MISSING else []
        for step, ids in _records(contents, _FILE_HEAD.size):
            parts.setdefault(step, []).append(ids)
    if not heads:
        return session
    if len(heads) != 1:
        raise DataError(f"{folder}: the ranks disagree on start and world size: {sorted(heads)}.")
    start_step, world_size = heads.pop()
    finished = sorted(step for step, ids in parts.items() if len(ids) == world_size)
    steps = {step: np.sort(np.concatenate(parts[step])) for step in finished}
    found = _Session(start_step, steps, min(missing, default=None))
    return replace(found, history=session.history, branches=session.branches) if session else found


def _read_session(folder: Path) -> _Session | None:
    """Return a session from its session.json, without records; None without that file."""
    try:
        values = load_json(folder / _SESSION_FILE, Rules(DataError, follow_links=False))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        start, history = int(str(values["start_step"])), int(str(values["history"]))
        branches = tuple((int(number), int(left)) for number, left in cast("list[list[int]]", values["branches"]))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{folder / _SESSION_FILE} is damaged: start_step, history or branches are wrong.") from None
    return _Session(start, {}, None if values.get("records") else start, history, branches)


def _records(contents: bytes, offset: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield records up to the first torn one."""
    while offset + _RECORD_HEAD.size <= len(contents):
        step, count, crc = _RECORD_HEAD.unpack_from(contents, offset)
        body = contents[offset + _RECORD_HEAD.size : offset + _RECORD_HEAD.size + 4 * count]
        if len(body) < 4 * count or zlib.crc32(body, zlib.crc32(struct.pack("<qI", step, count))) != crc:
            return
        yield step, np.frombuffer(body, "<u4").astype(np.int64)
        offset += _RECORD_HEAD.size + len(body)
