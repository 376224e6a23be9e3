"""Files that are there whole or not at all, whatever ends the process or fills the disk that they are written to."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, *content: str | bytes | memoryview) -> None:
    """Replace a file at once and for good: a temporary beside it, fsync, rename, fsync of the folder.

    Parts of `content` stand one behind the other; a memoryview is one of bytes. Raises OSError; then `path` is as it
    was and the temporary is gone. A link of that name is replaced, not followed.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        # Never through a link or into a file that somebody else has put there.
        with open(temporary, "xb", buffering=0) as file:
            for part in content:
                _write_all(file.fileno(), part)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_output(path: Path, content: str | bytes) -> None:
    """Write what the user asked for to where the user said, all of it or nothing. Raises OSError.

    Unlike `write_durably` it follows links, and writes into what is no file (/dev/stdout, a pipe) instead of replacing
    it.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb", buffering=0) as file:
            _write_all(file.fileno(), content)
    else:
        write_durably(Path(os.path.realpath(path)), content)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: str | bytes | memoryview) -> None:
    """A memoryview is one of bytes."""
    rest = memoryview(content.encode() if isinstance(content, str) else content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
