"""Files that `--input` names, on this machine: which there are, and how each is opened."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import BinaryIO

from llmscale.errors import DataError
from llmscale.untrusted.paths import open_regular

_BUFFER_BYTES = 1 << 20


class InputFile(ABC):
    """A file that can be opened as often as needed."""

    name: str
    """For messages; its suffix says what it is."""
    relative: str
    """Below the folder that was named."""
    size_bytes: int
    stamp: int | str
    """Changes with the contents."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Raises OSError, RefusedFile, DataError."""


class LocalFile(InputFile):
    """A regular file."""

    def __init__(self, path: Path, root: Path, *, follow_links: bool = True) -> None:
        status = path.stat(follow_symlinks=follow_links)
        self._path, self._follow_links = path, follow_links
        self.name, self.relative = str(path), path.relative_to(root).as_posix()
        self.size_bytes, self.stamp = status.st_size, status.st_mtime_ns

    def open(self) -> BinaryIO:
        # Lines are longer than the 8 KiB that Python reads at once.
        return io.BufferedReader(open_regular(self._path, follow_links=self._follow_links).detach(), _BUFFER_BYTES)


@contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """The file as it is stored. Raises DataError."""
    try:
        raw = file.open()
    except OSError as error:
        raise DataError(f"Cannot read {file.name}: {error.strerror or error}.") from None
    with raw:
        yield raw


def walk(root: Path) -> tuple[list[Path], list[Path]]:
    """All regular files below, in the order of their paths, and what is neither a file nor a folder of this tree: links
    that lead out of it or to a folder, FIFOs, sockets, devices. Hidden ones count for neither."""
    files, others = [], []
    inside = os.path.realpath(root)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in [*names, *subfolders]:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.is_symlink() and (path.is_dir() or not Path(os.path.realpath(path)).is_relative_to(inside)):
                others.append(path)
            elif path.is_file():
                files.append(path)
            elif not path.is_dir():
                others.append(path)
    return sorted(files), sorted(others)


def matches(relative: PurePath, glob: str) -> bool:
    """By name, or by path below the folder."""
    return fnmatch(relative.name, glob) or fnmatch(relative.as_posix(), glob)


def describe_left_out(root: Path, paths: list[Path]) -> str | None:
    """What to say of what `walk` found besides files."""
    if not paths:
        return None
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"Left out: {paths[0].relative_to(root)}{more}, no regular file of this folder (a link out of it or to a "
        "folder, a pipe, a device). Copy with `cp -rL` what should be read."
    )
