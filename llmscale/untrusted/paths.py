"""File names and files that somebody else chose: which of them are used at all.

A name read from a manifest decides what is opened, and for a remote set what is written, so it is checked before it
becomes a path. A file is opened only when it is a regular one: a FIFO would block for ever, a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath

from llmscale.untrusted.terminal import is_visible

#: What file systems allow for one name.
_MAX_NAME_BYTES = 255
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


class RefusedFile(OSError):
    """A path is no regular file, or holds more than it may; `strerror` says which, as for any OSError."""


def is_plain_name(name: object) -> bool:
    """Whether `name` is one component of a path that names the same file everywhere and is shown as it is."""
    if not isinstance(name, str) or name in ("", ".", "..") or name.startswith("-"):
        return False
    if "/" in name or "\\" in name or not is_visible(name):
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES


def find_link(folder: Path, relative: str) -> Path | None:
    """The first part of `relative` below `folder` that is a symbolic link; None when there is none."""
    path = folder
    for part in PurePosixPath(relative).parts:
        path = path / part
        if path.is_symlink():
            return path
    return None


def check_regular(path: Path, *, follow_links: bool) -> os.stat_result:
    """Status of a regular file. Raises FileNotFoundError and its like, RefusedFile for anything else than a file."""
    status = os.stat(path, follow_symlinks=follow_links)
    _refuse_other_kinds(path, status)
    return status


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading; never blocks. `follow_links`: whether its last part may be a symbolic link.

    Raises FileNotFoundError and its like, RefusedFile for a folder, a FIFO, a socket, a device, a link.
    """
    # Before it is opened: opening a device can have effects.
    check_regular(path, follow_links=follow_links)
    return os.fdopen(_open(path, os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW), 0), "rb")


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of a run for writing; return its descriptor. `flags` and `mode` as for os.open.

    Whoever packed the folder chose what stands under the name: a link leads elsewhere, a pipe blocks. Raises OSError,
    RefusedFile for anything else than a regular file.
    """
    with suppress(FileNotFoundError):
        check_regular(path, follow_links=False)
    return _open(path, flags | os.O_NOFOLLOW, mode)


def _open(path: Path, flags: int, mode: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise RefusedFile(errno.ELOOP, "is a symbolic link, not a regular file", str(path)) from None
        raise
    try:
        _refuse_other_kinds(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, max_bytes: int, *, follow_links: bool = True) -> bytes:
    """All of a regular file of at most `max_bytes`. Raises as open_regular, RefusedFile for a longer one."""
    with open_regular(path, follow_links=follow_links) as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise RefusedFile(errno.EFBIG, f"is larger than the {max_bytes:,} bytes that such a file may have", str(path))
    return contents


def _refuse_other_kinds(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise RefusedFile(errno.EINVAL, f"is {kind}, not a regular file", str(path))
