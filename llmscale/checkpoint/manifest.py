"""What a finished checkpoint looks like on disk, and how a damaged one is recognised. No torch.

    RUN/checkpoints/step-00000500/
        manifest.json     every file with its size and hash; written last, with a hash of its own
        state.json        counters, optimizer groups, loss scale, what defines the sample order, configuration
        tensors.json      index of the tensors
        __0_0.distcp ...  the tensors, one file per rank that wrote
    RUN/checkpoints/latest    the name of the newest finished checkpoint

A checkpoint is written in `.step-00000500.partial` and renamed when it is whole, so a folder of the final name was once
complete on disk.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from llmscale.data.preflight import hash_file as hash_content
from llmscale.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
LATEST_NAME = "latest"


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint."""

    name: str
    num_bytes: int
    xxh3_128: str
    """Hash of the content, in hexadecimal."""


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint is, readable without torch."""

    step: int
    """Optimizer steps done."""
    tokens_seen: int
    """Tokens trained on since step 0."""
    world_size: int
    """Ranks that wrote it; any number can read it."""
    zero_stage: int
    """ZeRO stage that wrote it; any stage can read it."""
    precision: str
    created: str
    """ISO 8601, UTC."""
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def checkpoints_folder(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps; sorts by step."""
    return f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run, the newest first; not verified."""
    found = checkpoints_folder(run).glob("step-*")
    return sorted((path for path in found if path.is_dir()), key=lambda path: path.name, reverse=True)


def hash_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is on disk."""
    return StoredFile(path.name, path.stat().st_size, hash_content(path, "xxh3_128"))


def save_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, durable when this returns."""
    body = {"format": FORMAT_VERSION, **asdict(manifest)}
    write_durably(folder / MANIFEST_NAME, json.dumps({"manifest": body, "xxh3_128": _hash_json(body)}, indent=1))


def load_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises CheckpointError when it is missing, damaged or of another format."""
    path = folder / MANIFEST_NAME
    try:
        stored = json.loads(path.read_text())
        body = dict(stored["manifest"])
        if _hash_json(body) != stored["xxh3_128"]:
            raise CheckpointError(f"{path} is damaged: its content does not match its hash.")
        if body.pop("format") != FORMAT_VERSION:
            raise CheckpointError(f"{path} has another format than {FORMAT_VERSION}; use the llmscale that wrote it.")
        files = tuple(StoredFile(**file) for file in body.pop("files"))
        return CheckpointManifest(files=files, **body)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a finished checkpoint: {MANIFEST_NAME} is missing.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None: the manifest, and every file's presence, size and hash.

    `part` of `parts` splits the hashing: rank r of N ranks checks every Nth file.
    """
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for stored in manifest.files[part::parts]:
        damage = _file_damage(folder / stored.name, stored)
        if damage:
            return damage
    return None


def _file_damage(path: Path, stored: StoredFile) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != stored.num_bytes:
            return f"{path} has {num_bytes} bytes instead of {stored.num_bytes}: it was cut short or overwritten."
        if hash_file(path).xxh3_128 != stored.xxh3_128:
            return f"{path} does not match its hash: its content was altered."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    return None


def read_latest(run: Path) -> str | None:
    """The name that `latest` holds, or None."""
    try:
        return (checkpoints_folder(run) / LATEST_NAME).read_text().strip() or None
    except OSError:
        return None


def write_durably(path: Path, text: str) -> None:
    """Replace a small file at once and for good: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_json(body: dict) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
