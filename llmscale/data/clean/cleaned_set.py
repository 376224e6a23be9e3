"""The folder that `data clean` writes, and how other commands know it.

OUT/clean.json                     what was done; written last
OUT/documents-00000.jsonl.zst ...  what is left: {"id": place in the input, "text": ...}
OUT/removed/01-exact.jsonl.zst ... what each step took, and why
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from llmscale.errors import DataError
from llmscale.untrusted.documents import Rules, load_json

MANIFEST_NAME = "clean.json"
REMOVED_FOLDER = "removed"
FORMAT = "llmscale clean"
#: Raised whenever older code could misread the folder.
FORMAT_VERSION = 1
_SHARD_PATTERN = "documents-*.jsonl.zst"


def shard_name(number: int) -> str:
    return f"documents-{number:05}.jsonl.zst"


def load_clean_manifest(folder: Path) -> dict[str, object] | None:
    """The manifest of a folder that `data clean` wrote, None where it did not. Raises DataError for a newer version."""
    path = folder / MANIFEST_NAME
    try:
        manifest = load_json(path, Rules(DataError, follow_links=False))
    except (OSError, DataError):
        return None
    if manifest.get("format") != FORMAT:
        return None
    if manifest.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{path} is of version {manifest.get('version')}, and this llmscale knows {FORMAT_VERSION}. Update it."
        )
    return manifest


def request_of(manifest: dict[str, object]) -> dict[str, object]:
    """What was asked for, by flag; empty in a damaged manifest."""
    request = manifest.get("request")
    return cast(dict[str, object], request) if isinstance(request, dict) else {}


def without_removed(files: Iterable[Path]) -> list[Path]:
    """Files of a folder less those in cleaned sets that are no documents: what was taken out must not come back."""
    found = list(files)
    cleaned = {
        path.parent for path in found if path.name == MANIFEST_NAME and load_clean_manifest(path.parent) is not None
    }
    return [path for path in found if _is_document(path, cleaned)] if cleaned else found


def _is_document(path: Path, cleaned: set[Path]) -> bool:
    around = next((folder for folder in path.parents if folder in cleaned), None)
    return around is None or (path.parent == around and path.match(_SHARD_PATTERN))
