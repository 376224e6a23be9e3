"""Keep a training run alive when its output cannot be written: on a full disk, or after its terminal has closed."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


def make_output_resilient() -> None:
    """Make stdout and stderr drop what cannot be written, with one warning on stderr.

    A stream that other code has put in the place of stdout or stderr is left alone. A stream that was closed before the
    process started drops everything.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lasts
        elif stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _resilient(stream))


def _resilient(stream: TextIO) -> TextIO:
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(ResilientWriter(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class ResilientWriter(io.FileIO):
    """Accept every byte, and drop those that the descriptor refuses."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._has_failed = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # a buffer, as typeshed's ReadableBuffer
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self.fileno(), rest) :]
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                with suppress(OSError):
                    os.write(
                        2, f"WARNING: the output cannot be written: {error.strerror}. The run continues.\n".encode()
                    )
        return size
