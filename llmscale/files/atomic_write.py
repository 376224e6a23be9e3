"""Write files atomically: after a crash or on a full disk a file is complete or unchanged."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, *content: str | bytes | memoryview) -> None:
    """Replace a file atomically and durably: write a temporary file beside it, fsync, rename, fsync the folder.

    The parts of `content` are concatenated; memoryviews are of bytes. A link at `path` is replaced, not followed.
    Raises OSError; then `path` is unchanged and the temporary file removed.
    """
    write_parts_durably(path, content)


def write_parts_durably(path: Path, content: Iterable[str | bytes | memoryview]) -> None:
    """Write parts as `write_durably` does, as they come. Raises OSError, and whatever `content` raises."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        # "x": never through a link or into a file that another user created.
        with open(temporary, "xb", buffering=0) as file:
            for part in content:
                _write_all(file.fileno(), part)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)


def write_output(path: Path, content: str | bytes) -> None:
    """Write a user's output file atomically. Raises OSError.

    Unlike `write_durably`, it follows links, and it writes into devices and pipes (/dev/stdout) instead of replacing
    them.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb", buffering=0) as file:
            _write_all(file.fileno(), content)
    else:
        write_durably(Path(os.path.realpath(path)), content)


def sync_path(path: Path) -> None:
    """Make a file's contents, or renames and new names in a folder, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: str | bytes | memoryview) -> None:
    rest = memoryview(content.encode() if isinstance(content, str) else content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
