"""`--record-samples`: which samples were really consumed, per step, surviving any crash. NumPy only.

Every start of a run is a session, and every rank of a session appends to a file of its own,
`samples/session-0002/rank-00003.bin`: one record per step, written when the step is done. `session.json` beside it has
the session's history, as a checkpoint has (checkpoint/inventory.py); the branches of the last one lead to the steps
that count. Within a history a session that starts at step s supersedes earlier records of steps >= s. Four bytes per
sample.

A disk that fills does not end training, so a record may be incomplete, and says so: its head names the first step that
is not in it from the moment when writing fails. That needs no room on the disk.
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
    """Return the number for a session that starts now. One rank asks and tells the others."""
    return max(_sessions(run_folder), default=-1) + 1


def begin_session(run_folder: Path, start_step: int, history: Mapping[str, object], *, records: bool) -> int:
    """Write which history a session continues (`history`: its number and branches), and whether it `records`: one that
    does not is a gap in an earlier record. Returns the session's number. Raises ConfigError."""
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
    """Appends one rank's ids per step. Step s is global batch s of the stream, counted from 0.

    Raises ConfigError when the record cannot be begun; from then on a disk that refuses is survived.
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
        """`check` raises OSError while the run folder is not this run's."""
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
            path.stat()  # what follows cannot be read without the head: a file that is gone is not begun again

        self._file = BufferedLog(path, are_lines=False, check=check_place)
        self._missing = _NONE_MISSING
        self._pending: list[NDArray[np.int64]] = []

    def add(self, sample_ids: NDArray[np.int64]) -> None:
        """Ids of one micro-batch."""
        self._pending.append(np.asarray(sample_ids, np.int64))

    def end_step(self, step: int) -> int:
        """Write down the ids added since the last step as those of `step`; returns their checksum."""
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
        """Keep the head true. Where even that fails, the next session's start shows the gap."""
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
    """The recorded samples of a run."""

    steps: dict[int, NDArray[np.int64]]
    """The current history: sorted ids of the global batch of each step, steps ascending."""
    gaps: tuple[str, ...]
    """Steps after the first that are in no record, in words."""


def load_recorded(run_folder: Path) -> dict[int, NDArray[np.int64]]:
    """Return the current history without gaps: sorted ids of the global batch of each step, steps ascending.

    A step that not every rank of a session has recorded at its end was never finished and is left out; a torn record
    at a file's end likewise. Raises DataError for malformed files, and for a history with gaps.
    """
    recorded = read_recorded(run_folder)
    if recorded.gaps:
        raise DataError(
            f"{run_folder / FOLDER} is incomplete, because the disk was full or --record-samples was not given: "
            f"{'; '.join(recorded.gaps)} is missing."
        )
    return recorded.steps


def read_recorded(run_folder: Path) -> Recorded:
    """Return all recorded steps of the current history, and the missing ones. Raises DataError for malformed files."""
    sessions = [session for _, folder in sorted(_sessions(run_folder).items()) if (session := _load_session(folder))]
    if not sessions:
        return Recorded({}, ())
    # Numbers of histories only grow, so that the sessions are in the order of the steps that count.
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
        # What this session does not know begins here; what the sessions after it know, they have recorded.
        missing = session.first_missing
        if missing is not None and missing < end and missing not in history:
            unknown_from = missing if unknown_from is None else min(unknown_from, missing)
    gaps = [_words(first, last) for first, last in _holes([begin - 1, *history])]
    if unknown_from is not None and unknown_from > max(history, default=begin - 1):
        gaps.append(f"step {unknown_from} and what came after it")
    return Recorded(dict(sorted(history.items())), tuple(gaps))


def _holes(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of steps that are not there."""
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
    """Those that all ranks finished."""
    first_missing: int | None
    """The first step that some rank could not write down."""
    history: int = 1
    branches: tuple[tuple[int, int], ...] = ()
    """(history, steps done) where each history that leads to this one was left."""


def _load_session(folder: Path) -> _Session | None:
    """Return a session; None when it was killed before it began."""
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
            continue  # killed before the first byte was down
        magic, start_step, world_size, first_missing = _FILE_HEAD.unpack_from(contents)
        if magic != _MAGIC:
            raise DataError(f"{path} is not a record of samples.")
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
    """Return a session without its records; None for one without a file about it, which is of history 1."""
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
    """Records up to the first that is torn."""
    while offset + _RECORD_HEAD.size <= len(contents):
        step, count, crc = _RECORD_HEAD.unpack_from(contents, offset)
        body = contents[offset + _RECORD_HEAD.size : offset + _RECORD_HEAD.size + 4 * count]
        if len(body) < 4 * count or zlib.crc32(body, zlib.crc32(struct.pack("<qI", step, count))) != crc:
            return
        yield step, np.frombuffer(body, "<u4").astype(np.int64)
        offset += _RECORD_HEAD.size + len(body)
