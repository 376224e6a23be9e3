"""Compare two copies of a package by the hashes of their source files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_hashes(package: Path) -> dict[str, str]:
    """Return the sha256 of every Python file of a package, by its relative path."""
    return {path.relative_to(package).as_posix(): hash_or_reason(path) for path in sorted(package.rglob("*.py"))}


def hash_or_reason(path: Path) -> str:
    """Return the sha256 of a small file, or the reason why it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
