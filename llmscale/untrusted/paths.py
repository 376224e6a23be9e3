"""Check untrusted file names and files before they are used.

A name from a manifest decides which file is opened or written, so it is checked before it becomes a path. Only regular
files are opened: a FIFO would block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from llmscale.errors import ConfigError, LlmscaleError
from llmscale.untrusted.terminal import is_visible

#: First line of the file that stands for one in Git LFS, and the largest size of such a file
#: (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
_POINTER_LINE = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER_BYTES = 1024
POINTER = "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
#: Longest file name that file systems allow.
_MAX_NAME_BYTES = 255
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


class RefusedFile(OSError):
    """A path is not a regular file, the file is too large, or a Git LFS pointer; `strerror` says which."""


@contextmanager
def unreadable_as(error: type[LlmscaleError], what: object, remedy: str = "") -> Iterator[None]:
    """Raise `error`, "`what` cannot be read: (reason). `remedy`", in place of an OSError."""
    try:
        yield
    except OSError as fault:
        raise error(f"{what} cannot be read: {fault.strerror or fault}. {remedy}".rstrip()) from None


def in_home(path: Path | str) -> Path:
    """Return a path whose `~` is the user's home folder. Raises ConfigError for a user who has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} is in the home folder, and this user has none. Set HOME to a folder that may be written to."
        ) from None


def is_plain_name(name: object) -> bool:
    """Return whether `name` is a single, printable path component that means the same file everywhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or name.startswith("-"):
        return False
    if "/" in name or "\\" in name or not is_visible(name):
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES


def check_regular(path: Path, *, follow_links: bool) -> os.stat_result:
    """Return the status of a regular file. Raises OSError, and RefusedFile for anything else."""
    status = os.stat(path, follow_symlinks=follow_links)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise RefusedFile(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    return status


def is_pointer(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a Git LFS pointer."""
    return head.startswith(_POINTER_LINE)


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading. `follow_links`: whether its last part may be a symbolic link.

    Raises OSError, and RefusedFile for a folder, a FIFO, a device, a link, a Git LFS pointer.
    """
    status = check_regular(path, follow_links=follow_links)
    file = path.open("rb")
    # Read at a position, which leaves that of the file at its beginning.
    if status.st_size <= _MOST_POINTER_BYTES and is_pointer(os.pread(file.fileno(), len(_POINTER_LINE), 0)):
        file.close()
        raise RefusedFile(errno.EINVAL, POINTER, str(path))
    return file


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a run's file for writing and return its descriptor. `flags` and `mode` are os.open's.

    Raises OSError, and RefusedFile for a symbolic link.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RefusedFile(errno.ELOOP, "is a symbolic link, not a regular file", str(path)) from None
        raise


def read_regular(path: Path, max_bytes: int, *, follow_links: bool = True) -> bytes:
    """Return the contents of a regular file. Raises as open_regular, and RefusedFile beyond `max_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise RefusedFile(errno.EFBIG, f"is larger than the limit of {max_bytes:,} bytes", str(path))
    return contents
