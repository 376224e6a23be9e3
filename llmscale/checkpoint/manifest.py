"""What a finished checkpoint looks like on disk, and how a damaged one is recognised. No torch.

    RUN/checkpoints/step-00000500/
        manifest.json     every file with its size and hash; written last, with a hash of its own
        state.json        counters, optimizer groups, loss scale, what defines the sample order, configuration
        tensors.json      index of the tensors
        __0_0.distcp ...  the tensors, one file per rank that wrote
    RUN/checkpoints/latest    the name of the checkpoint that `--resume auto` would begin with
    RUN/checkpoints/history.json    which of them count: history.py

A checkpoint is written in `.step-00000500.partial` and renamed when it is whole, so a folder of the final name was once
complete on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeGuard, TypeVar, cast

import xxhash

from llmscale.data.shards.verify_shards import hash_file as hash_content
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import check_regular

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
LATEST_NAME = "latest"
CHECKPOINTS_NAME = "checkpoints"
#: `.old-1`: what lay in the place of a checkpoint that another history saved at the same step.
CHECKPOINT_NAME = re.compile(r"(step-(\d{8,}))(\.old-[1-9]\d*)?", re.ASCII)
#: Every file that a save lists: see the top of this file.
_STORED_NAME = re.compile(r"state\.json|tensors\.json|__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint."""

    name: str
    num_bytes: int
    xxh3_128: str
    """Hash of the content, in hexadecimal."""


@dataclass(frozen=True)
class History:
    """One line of steps, from step 0 to the newest checkpoint saved in it."""

    number: int = 1
    branches: tuple[tuple[int, int], ...] = ()
    """(history, step) where each history that leads to this one was left, the oldest first; none for one that began
    at step 0, or from another run's checkpoint."""

    def includes(self, number: int, step: int) -> bool:
        """Whether step `step` of history `number` is a part of this one."""
        return number == self.number or any(number == other and step <= left for other, left in self.branches)

    def as_dict(self) -> dict[str, object]:
        """As JSON values; parse_history reads them."""
        return {"history": self.number, "branches": [list(branch) for branch in self.branches]}


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
    history: History = field(default_factory=History)
    """The line of steps that it ends."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def checkpoints_folder(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / CHECKPOINTS_NAME


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps; sorts by step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def hash_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is on disk."""
    return StoredFile(path.name, path.stat().st_size, hash_content(path, "xxh3_128"))


def save_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, durable when this returns."""
    values = asdict(manifest)
    del values["history"]
    body = {"format": FORMAT_VERSION, **values, **manifest.history.as_dict()}
    write_durably(folder / MANIFEST_NAME, json.dumps({"manifest": body, "xxh3_128": hash_json(body)}, indent=1))


def load_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises CheckpointError when it is missing, damaged, of another format, or of
    another step than the folder's name says."""
    path = folder / MANIFEST_NAME
    try:
        stored = load_json(path, Rules(CheckpointError, follow_links=False))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is not a finished checkpoint: {MANIFEST_NAME} is missing.") from None
    body = signed_body(stored, "manifest", str(path))
    if body.pop("format", None) != FORMAT_VERSION:
        raise CheckpointError(f"{path} has another format than {FORMAT_VERSION}; use the llmscale that wrote it.")
    listed = body.pop("files", None)
    if not isinstance(listed, list):
        raise CheckpointError(f"{path} lists no files.")
    files = tuple(_build(StoredFile, file, f"{path}, files") for file in listed)
    for file in files:
        check_stored_name(file.name, str(path))
    # Those of before there were histories are of the first.
    history = parse_history(body.pop("history", 1), body.pop("branches", []), str(path))
    manifest = _build(CheckpointManifest, {**body, "files": files, "history": history}, str(path))
    name = CHECKPOINT_NAME.fullmatch(folder.name)
    if name and int(name[2]) != manifest.step:
        raise CheckpointError(
            f"{path} says that this is the checkpoint of step {manifest.step}: the folder was renamed. Its name is "
            f"{checkpoint_name(manifest.step)}."
        )
    return manifest


def signed_body(stored: Mapping[str, object], name: str, where: str) -> dict[str, object]:
    """The JSON object `name` beside its hash. Raises CheckpointError when they do not match."""
    if name not in stored:
        raise CheckpointError(f"{where} belongs to no checkpoint, or is damaged: it has no '{name}'.")
    body = stored.get(name)
    if not isinstance(body, dict) or hash_json(body) != stored.get("xxh3_128"):
        raise CheckpointError(f"{where} is damaged: its content does not match its hash.")
    return body


def parse_history(number: object, branches: object, where: str) -> History:
    """A history from JSON values. Raises CheckpointError."""
    pairs = [tuple(pair) for pair in branches if isinstance(pair, list)] if isinstance(branches, list) else []
    is_legal = isinstance(branches, list) and len(pairs) == len(branches)
    if not is_legal or not is_count(number) or not all(len(pair) == 2 and all(map(is_count, pair)) for pair in pairs):
        raise CheckpointError(f"{where}: history {str(number)[:80]!r} with branches {str(branches)[:80]!r} is none.")
    return History(number, tuple((left, step) for left, step in pairs))


def check_stored_name(name: object, where: str) -> None:
    """Refuse a file name that no save writes: whoever wrote the checkpoint chose it. Raises CheckpointError."""
    if not isinstance(name, str) or not _STORED_NAME.fullmatch(name):
        raise CheckpointError(
            f"{where} names the file {str(name)[:80]!r}. Legal: {STATE_NAME}, tensors.json, __0_0.distcp and so on."
        )


def _build(kind: type[_T], values: object, where: str) -> _T:
    """A dataclass from a JSON object with these fields, texts or numbers of at least 0. Raises CheckpointError."""
    known = {entry.name: entry.type for entry in fields(cast(type, kind))}
    if not isinstance(values, dict) or values.keys() != known.keys():
        raise CheckpointError(f"{where} must hold {', '.join(known)} and nothing else.")
    for name, value in values.items():
        if (known[name] == "int" and not is_count(value)) or (known[name] == "str" and not isinstance(value, str)):
            raise CheckpointError(f"{where}: {name} cannot be {str(value)[:80]!r}.")
    return kind(**values)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from JSON is a whole number of at least 0; true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def find_damage(
    folder: Path, part: int = 0, parts: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
) -> str | None:
    """What is wrong with a checkpoint, or None: the manifest, and every file's presence, size and hash.

    `part` of `parts` splits the hashing: rank r of N ranks checks every Nth file. `progress` gets numbers
    of bytes that are hashed.
    """
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for stored in manifest.files[part::parts]:
        damage = _file_damage(folder / stored.name, stored, progress)
        if damage:
            return damage
    return None


def is_whole(folder: Path, manifest: CheckpointManifest) -> bool:
    """Whether every file is there at its full length; nothing is read."""
    return all(_size_damage(folder / stored.name, stored) is None for stored in manifest.files)


def _file_damage(path: Path, stored: StoredFile, progress: Callable[[int], object]) -> str | None:
    damage = _size_damage(path, stored)
    try:
        if damage is None and hash_content(path, "xxh3_128", progress) != stored.xxh3_128:
            return f"{path} does not match its hash: its content was altered."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    return damage


def _size_damage(path: Path, stored: StoredFile) -> str | None:
    try:
        num_bytes = check_regular(path, follow_links=False).st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    if num_bytes != stored.num_bytes:
        return f"{path} has {num_bytes} bytes instead of {stored.num_bytes}: it was cut short or overwritten."
    return None


def hash_json(body: dict) -> str:
    """Hash of JSON values, whatever the order of their keys."""
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
