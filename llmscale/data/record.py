"""`--record-samples`: which samples were really consumed, per step, surviving any crash. NumPy only.

Every start of a run is a session, and every rank of a session appends to a file of its own,
`samples/session-0002/ rank-00003.bin`: one record per step, written by a single call when the step is done. A
session that starts at step s supersedes the records of steps >= s of the sessions before it: that history was
abandoned. Four bytes per sample.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.mix import mix64
from llmscale.errors import DataError

FOLDER = "samples"
_MAGIC = b"LLMSIDS1"
# File: magic, start step, world size. Record: step, number of ids, CRC-32 of (step, number, ids); then the
# ids.
_FILE_HEAD = struct.Struct("<8sqq")
_RECORD_HEAD = struct.Struct("<qII")
_SESSION = re.compile(r"session-(\d+)$")


def ids_checksum(sample_ids: NDArray[np.int64]) -> int:
    """Order-independent checksum, an int64 that adds up over ranks (modulo 2^64) to the batch's.

    A sum of mixed ids: a wrong, missing or repeated id goes unnoticed with probability 2^-64.
    """
    total = mix64(np.asarray(sample_ids).astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64)
    return int(total.astype(np.int64))


def next_session(run_folder: Path) -> int:
    """The number for a session that starts now. One rank asks and tells the others."""
    return max(_sessions(run_folder), default=-1) + 1


class SampleRecorder:
    """Appends one rank's ids per step. Step s is global batch s of the stream, counted from 0."""

    def __init__(self, run_folder: Path, *, session: int, rank: int, world_size: int, start_step: int) -> None:
        folder = run_folder / FOLDER / f"session-{session:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05d}.bin"
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            raise DataError(f"{path} exists: every start of a run needs its own session number.") from None
        os.write(self._file, _FILE_HEAD.pack(_MAGIC, start_step, world_size))
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
        os.write(self._file, _RECORD_HEAD.pack(step, len(ids), crc) + body)
        return ids_checksum(ids)

    def close(self) -> None:
        os.close(self._file)


def load_recorded(run_folder: Path) -> dict[int, NDArray[np.int64]]:
    """The surviving history: sorted ids of the global batch of each step, steps ascending.

    A step that not every rank of a session has recorded was never finished and is left out; a torn record at
    a file's end likewise. Raises DataError for files that are no records, or when a finished step lies behind
    an unfinished one.
    """
    history: dict[int, NDArray[np.int64]] = {}
    for session, folder in sorted(_sessions(run_folder).items()):
        start_step, steps = _load_session(folder, session)
        history = {step: ids for step, ids in history.items() if step < start_step}
        history.update(steps)
    return dict(sorted(history.items()))


def _sessions(run_folder: Path) -> dict[int, Path]:
    matches = ((path, _SESSION.match(path.name)) for path in (run_folder / FOLDER).glob("session-*"))
    return {int(match.group(1)): path for path, match in matches if match}


def _load_session(folder: Path, session: int) -> tuple[int, dict[int, NDArray[np.int64]]]:
    """First step, and the ids of every step that all ranks finished."""
    parts: dict[int, list[NDArray[np.int64]]] = {}
    heads = set()
    for path in sorted(folder.glob("rank-*.bin")):
        contents = path.read_bytes()
        if len(contents) < _FILE_HEAD.size:
            continue  # killed before the first byte was down
        magic, start_step, world_size = _FILE_HEAD.unpack_from(contents)
        if magic != _MAGIC:
            raise DataError(f"{path} is not a record of samples.")
        heads.add((start_step, world_size))
        for step, ids in _records(contents):
            parts.setdefault(step, []).append(ids)
    if len(heads) != 1:
        if not heads:
            return 1 << 62, {}
        raise DataError(f"{folder}: the ranks of session {session} disagree on start and world size: {sorted(heads)}.")
    start_step, world_size = heads.pop()
    finished = sorted(step for step, ids in parts.items() if len(ids) == world_size)
    if finished != list(range(start_step, start_step + len(finished))):
        raise DataError(f"{folder}: a step is missing among {finished[:1]}..{finished[-1:]} of session {session}.")
    return start_step, {step: np.sort(np.concatenate(parts[step])) for step in finished}


def _records(contents: bytes) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Records up to the first that is torn."""
    offset = _FILE_HEAD.size
    while offset + _RECORD_HEAD.size <= len(contents):
        step, count, crc = _RECORD_HEAD.unpack_from(contents, offset)
        body = contents[offset + _RECORD_HEAD.size : offset + _RECORD_HEAD.size + 4 * count]
        if len(body) < 4 * count or zlib.crc32(body, zlib.crc32(struct.pack("<qI", step, count))) != crc:
            return
        yield step, np.frombuffer(body, "<u4").astype(np.int64)
        offset += _RECORD_HEAD.size + len(body)
