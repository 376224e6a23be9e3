"""Keep a training run alive when its output cannot be written: on a full disk, or after its terminal has closed."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


def make_output_resilient() -> None:
    """Make stdout and stderr drop what cannot be written, and report the loss once writing works again.

    A stream that other code has put in the place of stdout or stderr is left alone. A stream that was closed before the
    process started drops everything.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lasts
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _resilient(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _resilient(sys.stderr)


def _resilient(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(ResilientWriter(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class ResilientWriter(io.RawIOBase):
    """Accept every byte, and drop those that the descriptor refuses."""

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
