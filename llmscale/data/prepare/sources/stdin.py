"""Standard input as a file: what a pipe holds, kept so that it has an identity and can be read again."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from typing import BinaryIO

from llmscale.data.prepare.sources.input_files import InputFile
from llmscale.errors import DataError

STDIN = "-"
_CHUNK_BYTES = 1 << 20


class StandardInput(InputFile):
    """Everything that stdin holds, in a file without a name in TMPDIR; its stamp is the sha256."""

    def __init__(self) -> None:
        """Reads to the end. Raises DataError: a terminal, nothing there, disk full."""
        if sys.stdin is None or sys.stdin.isatty():
            raise DataError("--input - reads standard input, and that is a terminal. Pipe the text in.")
        digest, self.size_bytes = hashlib.sha256(), 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the source
        try:
            while chunk := sys.stdin.buffer.read(_CHUNK_BYTES):
                digest.update(chunk)
                self._file.write(chunk)
                self.size_bytes += len(chunk)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"--input - cannot be kept in {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a larger disk."
            ) from None
        if not self.size_bytes:
            raise DataError("--input - reads standard input, and it is empty.")
        self.name, self.relative, self.stamp = "stdin", STDIN, digest.hexdigest()

    def open(self) -> BinaryIO:
        descriptor = os.dup(self._file.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return open(descriptor, "rb", _CHUNK_BYTES)
