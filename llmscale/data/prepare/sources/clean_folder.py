"""Recognise the folder that `data clean` writes.

OUT/clean.json                     settings and counts; written last
OUT/documents-00000.jsonl.zst ...  kept documents: {"id": place in the input, "text": ...}
OUT/removed/01-exact.jsonl.zst ... documents removed by each step, with the reason (on Ray also 01-exact-00003...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import TypeVar, cast

from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import read_regular

_P = TypeVar("_P", bound=PurePath)
MANIFEST_NAME = "clean.json"
REMOVED_FOLDER = "removed"
FORMAT = "llmscale clean"
#: Raised whenever older code could misread the folder.
FORMAT_VERSION = 1
_SHARD_PATTERN = "documents-*.jsonl.zst"


def shard_name(number: int) -> str:
    return f"documents-{number:05}.jsonl.zst"


def load_clean_manifest(folder: Path) -> dict[str, object] | None:
    """Return the manifest of a folder that `data clean` wrote, else None. Raises DataError for a newer version."""
    path = folder / MANIFEST_NAME
    try:
        contents = read_regular(path, MAX_BYTES)
    except OSError:
        return None
    return parse_clean_manifest(contents, str(path))


def parse_clean_manifest(contents: bytes, where: str) -> dict[str, object] | None:
    """Return the manifest in a file's contents, else None. Raises DataError for a newer version."""
    try:
        manifest = parse_json(contents, Rules(DataError), where)
    except DataError:
        return None
    if manifest.get("format") != FORMAT:
        return None
    if manifest.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{where} is of version {manifest.get('version')}, and this llmscale knows {FORMAT_VERSION}. Update it."
        )
    return manifest


def request_of(manifest: dict[str, object]) -> dict[str, object]:
    """Return the settings by flag; empty for a damaged manifest."""
    request = manifest.get("request")
    if isinstance(request, dict):
        return cast(dict[str, object], request)
    return {}


def without_removed(files: Iterable[_P], root: PurePath, is_cleaned: Callable[[PurePath], bool]) -> list[_P]:
    """Return the files at or below `root` without manifests and removed documents of cleaned folders.

    `is_cleaned` tells whether `data clean` wrote a folder. Its manifest need not be among the files.
    """
    paths = list(files)
    folders = {path.parent for path in paths if path.name == MANIFEST_NAME}
    folders |= {path.parent.parent for path in paths if path.parent.name == REMOVED_FOLDER}
    cleaned: set[PurePath] = {folder for folder in folders if folder.is_relative_to(root) and is_cleaned(folder)}
    if cleaned:
        return [path for path in paths if _is_document(path, cleaned)]
    return paths


def _is_document(path: PurePath, cleaned: set[PurePath]) -> bool:
    around = next((folder for folder in path.parents if folder in cleaned), None)
    return around is None or (path.parent == around and path.match(_SHARD_PATTERN))
