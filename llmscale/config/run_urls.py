"""Names of runs in an object store, and the folders of their copies on this disk.

The copy of s3://BUCKET/NAME is COPIES/train/s3/BUCKET/NAME where a trainer writes to it, and COPIES/view/s3/BUCKET/NAME
where commands read it. So every other part of llmscale sees a folder.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from llmscale.config.user_paths import check_path, check_path_or_name, check_text
from llmscale.untrusted.paths import in_home

Kind = Literal["train", "view"]
#: Folder of the copies, on a local disk.
COPIES_VARIABLE = "LLMSCALE_RUNS"
_COPIES = "~/.cache/llmscale/runs"
#: Schemes of the stores that have conditional writes.
RUN_SCHEMES = ("s3", "gs", "az", "azure")
#: Longest part of a URL: the copy has files beside the folder with slightly longer names.
_MAX_PART_BYTES = 200


def copies_folder() -> Path:
    """Return the folder of the copies."""
    return Path(os.path.abspath(in_home(os.environ.get(COPIES_VARIABLE) or _COPIES)))


def copy_of(url: str, kind: Kind) -> Path:
    """Return the folder of the copy of a run or of one of its checkpoints. Raises ValueError, whose text completes a
    sentence, for a URL that cannot hold a run."""
    scheme, _, path = check_text(url).partition("://")
    parts = path.rstrip("/").split("/")
    is_legal = scheme in RUN_SCHEMES and len(parts) >= 2 and not any(part in ("", ".", "..") for part in parts)
    if not is_legal or set("?#*[]\\@") & set(url) or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in parts):
        legal = ", ".join(f"{name}://BUCKET/NAME" for name in RUN_SCHEMES[:3])
        raise ValueError(f"must be a path, or a run in a store: {legal}, without ? # * [ ] @")
    return copies_folder() / kind / scheme / "/".join(parts)


def url_of(path: Path) -> str | None:
    """Return the URL of which `path` is the copy; None for any other path."""
    with suppress(ValueError):
        _, scheme, *parts = Path(os.path.abspath(path)).relative_to(copies_folder()).parts
        return f"{scheme}://{'/'.join(parts)}" if scheme in RUN_SCHEMES and len(parts) >= 2 else None
    return None


def is_view(path: Path) -> bool:
    """Return whether `path` is in a copy that commands read."""
    return Path(os.path.abspath(path)).is_relative_to(copies_folder() / "view")


def shown(path: Path) -> str:
    """Return a run's name for messages: its URL, or its path."""
    return url_of(path) or str(path)


def _has_scheme(value: object) -> bool:
    return isinstance(value, str) and re.match(r"[A-Za-z][\w+.-]*://", value) is not None


def check_own_run(value: object) -> Path:
    """Return the folder of the run to train: a path, or the copy of a URL. Raises ValueError like check_path."""
    return copy_of(str(value), "train") if _has_scheme(value) else check_path(value)


def check_other_run(value: object) -> Path:
    """Return the folder of a run to read: a path, or the copy of a URL. Raises ValueError like check_path."""
    return copy_of(str(value), "view") if _has_scheme(value) else check_path(value)


def check_other_run_or_name(text: str) -> str:
    """Return a path, the copy of a URL, a word, or a published model's name (hf:). Raises ValueError."""
    return str(copy_of(text, "view")) if _has_scheme(text) else check_path_or_name(text)
