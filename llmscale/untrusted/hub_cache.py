"""huggingface_hub's cache on this machine, in its own layout: what one of both has fetched, the other finds.

`models--ORGANISATION--NAME/snapshots/COMMIT/FILE`, with the commit that a branch or tag was at in `refs/REVISION`, and
an empty `.no_exist/COMMIT/FILE` for a file that there is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmscale.untrusted.paths import read_regular

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Whether a revision names the same files for ever."""
    return _COMMIT.fullmatch(revision) is not None


def hub_home() -> Path:
    """The folder of huggingface_hub on this machine."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME", f"{caches}/huggingface")).expanduser()


def hub_cache(model: str) -> Path:
    """Where huggingface_hub keeps a model on this machine."""
    return Path(os.environ.get("HF_HUB_CACHE", hub_home() / "hub")).expanduser() / f"models--{model.replace('/', '--')}"


def find_snapshot(model: str, revision: str, needed: str) -> Path | None:
    """The cached folder of a revision that holds `needed`; of a branch, what it was when it was fetched."""
    cache = hub_cache(model)
    commit = revision
    if not is_commit(revision):
        try:
            commit = read_regular(cache / "refs" / revision, 64).decode("ascii").strip()
        except (OSError, ValueError):
            return None
    folder = cache / "snapshots" / commit
    return folder if is_commit(commit) and (folder / needed).is_file() else None


def cached_commits(model: str, needed: str) -> str:
    """What to ask for where the cache has that file of a model, and not what this revision was at."""
    found = (hub_cache(model) / "snapshots").glob("*")
    commits = [path.name for path in found if is_commit(path.name) and (path / needed).is_file()]
    return f"The cache has {model}@{min(commits)}, which can be named so. " if commits else ""


def absence_path(model: str, commit: str, part: str) -> Path:
    """The empty file by which huggingface_hub remembers that a commit has no such file."""
    return hub_cache(model) / ".no_exist" / commit / part


def note_absent(model: str, commit: str, part: str) -> None:
    """Remember it, where the cache can be written."""
    with contextlib.suppress(OSError):
        path = absence_path(model, commit, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def keep_files(model: str, revision: str, commit: str, contents: Mapping[str, bytes]) -> Path | None:
    """Put fetched files into the cache; None where it cannot be written."""
    cache = hub_cache(model)
    folder = cache / "snapshots" / commit
    try:
        for part, content in contents.items():
            if not (folder / part).is_file():
                _write(folder / part, content)
        if revision != commit:
            _write(cache / "refs" / revision, commit.encode())
    except OSError:
        return None
    return folder


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: others read the cache meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def one_at_a_time(model: str) -> Iterator[None]:
    """Let one process of this host fetch; the others find in the cache what it fetched. Not where locks cannot be."""
    cache = hub_cache(model)
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            locks = cache.parent / ".locks" / cache.name
            locks.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(open(locks / "llmscale-lock", "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
