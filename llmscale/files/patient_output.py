"""stdout and stderr that a full disk, or a terminal that is gone, cannot turn into the end of a training run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


def make_output_patient() -> None:
    """From now on what cannot be printed is dropped, and said as soon as something can be printed again.

    A stream that somebody else has put in the place of stdout or stderr is left alone; one that was closed before the
    start drops everything.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lasts
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _patient(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _patient(sys.stderr)


def _patient(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_PatientWriter(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class _PatientWriter(io.RawIOBase):
    """Takes every byte, and passes on those that the descriptor takes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._dropped_bytes = 0
        self._why = ""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # a buffer, as typeshed's ReadableBuffer
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            if self._dropped_bytes:
                note = f"\n[{self._dropped_bytes:,} bytes of output are missing here: {self._why}]\n".encode()
                if os.write(self._descriptor, note) == len(note):
                    self._dropped_bytes = 0
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._dropped_bytes += len(rest)
            self._why = error.strerror or str(error)
        return size
