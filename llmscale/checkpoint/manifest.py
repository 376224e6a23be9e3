"""The layout of a checkpoint on disk, its manifest, and the detection of damage. No torch.

    RUN/checkpoints/step-00000500/
        manifest.json     every file with its size and hash; written last, with a hash of its own
        state.json        counters, optimizer groups, loss scale, what defines the sample order, configuration
        tensors.json      index of the tensors
        __0_0.distcp ...  the tensors, one file per rank that wrote
        pieces.json       only where other disks or a store hold some of the files: what is on this disk
    RUN/checkpoints/latest    the name of the checkpoint that `--resume auto` would begin with
    RUN/checkpoints/best      the name of the one with the lowest validation loss
    RUN/checkpoints/history.json, kept.json    see inventory.py

A checkpoint is written in `.step-00000500.partial` and renamed when it is complete, so a folder with the final name was
once complete on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, TypeGuard

import xxhash
from pydantic import ConfigDict, Field

from llmscale.data.shards.verify_shards import hash_file as hash_content
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import MAX_BYTES, Rules, build, load_json
from llmscale.untrusted.paths import check_regular, open_regular

FORMAT_VERSION = 1
#: Space that a save needs beyond the tensors: the small files, and the file system's overhead.
SPARE_BYTES = 64 * 2**20
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
LATEST_NAME = "latest"
BEST_NAME = "best"
PIECES_NAME = "pieces.json"
CHECKPOINTS_NAME = "checkpoints"
#: `.old-1`: a checkpoint that was replaced when another history saved the same step.
CHECKPOINT_NAME = re.compile(r"(step-([0-9]{8,}))(\.old-[1-9][0-9]*)?")
#: Names of the files in a manifest.
_STORED_NAME = re.compile(r"state\.json|tensors\.json|__[0-9]{1,9}_[0-9]{1,9}\.distcp")
#: Checks of a manifest's values, because a checkpoint is not trusted.
_RULES = Rules(CheckpointError)
_Count = Annotated[int, Field(ge=0)]
_StoredName = Annotated[str, Field(pattern=f"^({_STORED_NAME.pattern})$")]


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint."""

    name: _StoredName
    num_bytes: _Count
    xxh3_128: str
    """Hash of the content, hexadecimal."""


@dataclass(frozen=True)
class History:
    """One line of steps, from step 0 to the newest checkpoint saved in it."""

    number: _Count = 1
    branches: tuple[tuple[_Count, _Count], ...] = ()
    """(history, step) at which each earlier history was left, the oldest first; empty for a history that began at step
    0 or from another run's checkpoint."""

    def includes(self, number: int, step: int) -> bool:
        """Return whether step `step` of history `number` belongs to this history."""
        return number == self.number or any(number == other and step <= left for other, left in self.branches)

    def as_dict(self) -> dict[str, object]:
        """Return JSON values for parse_history."""
        return {"history": self.number, "branches": [list(branch) for branch in self.branches]}


@dataclass(frozen=True)
class Validation:
    """Validation of the weights in a checkpoint."""

    loss: float
    """Finite loss, in nats per token."""
    samples: str
    """Description of the samples. Only losses over the same samples are compared."""


@dataclass(frozen=True)
class CheckpointManifest:
    """Description of a checkpoint, readable without torch."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    step: _Count
    """Optimizer steps done."""
    tokens_seen: _Count
    """Tokens trained on since step 0."""
    world_size: _Count
    """Ranks that wrote it; any number can read it."""
    zero_stage: _Count
    """ZeRO stage that wrote it; any stage can read it."""
    precision: str
    created: str
    """ISO 8601, UTC."""
    files: tuple[StoredFile, ...]
    history: History = field(default_factory=History)
    """The line of steps that it ends."""
    validation: Validation | None = None
    """Validation after its step; None without one at this step."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose name and manifest agree. Its files are not verified."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def history(self) -> History:
        return self.manifest.history

    def files_here(self) -> tuple[StoredFile, ...]:
        """Return the files that should be on this disk. Raises CheckpointError."""
        pieces = load_pieces(self.path)
        if pieces is None:
            return self.manifest.files
        return tuple(file for file in self.manifest.files if file.name == STATE_NAME or file.name in pieces.files)

    def is_whole(self) -> bool:
        """Return whether every file of this disk exists at its full length, without reading it."""
        return all(_find_damage(self.path / stored.name, stored) is None for stored in self.files_here())

    def find_damage(
        self, part: int = 0, parts: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
    ) -> str | None:
        """Return what is damaged on this disk, or None: a file's presence, size or hash.

        `part` of `parts` splits the hashing: rank r of N ranks checks every Nth file. `progress` gets numbers of hashed
        bytes.
        """
        try:
            files = self.files_here()
        except CheckpointError as error:
            return str(error)
        damages = (_find_damage(self.path / stored.name, stored, progress) for stored in files[part::parts])
        return next((damage for damage in damages if damage), None)


@dataclass(frozen=True)
class Pieces:
    """The part of a checkpoint that is on this disk."""

    files: tuple[_StoredName, ...]
    """Names of the tensor files here; the small files are on every disk."""
    remote: str | None = None
    """Folder of the whole checkpoint in the run's store; None if it is not there."""


def checkpoints_folder(run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / CHECKPOINTS_NAME


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps; names sort by step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def hash_file(path: Path) -> StoredFile:
    """Return size and hash of a file on disk."""
    return StoredFile(path.name, path.stat().st_size, hash_content(path, "xxh3_128"))


def save_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest durably."""
    values = asdict(manifest)
    del values["history"]
    if manifest.validation is None:
        del values["validation"]
    body = {"format": FORMAT_VERSION, **values, **manifest.history.as_dict()}
    write_durably(folder / MANIFEST_NAME, json.dumps({"manifest": body, "xxh3_128": hash_json(body)}, indent=1))


def load_manifest(folder: Path) -> CheckpointManifest:
    """Load a checkpoint's manifest.

    Raises CheckpointError when it is missing, damaged, of another format, or of another step than the folder's name.
    """
    path = folder / MANIFEST_NAME
    stored = load_if_there(path)
    if stored is None:
        raise CheckpointError(f"{folder} is not a finished checkpoint: {MANIFEST_NAME} is missing.")
    body = signed_body(stored, "manifest", str(path))
    if body.pop("format", None) != FORMAT_VERSION:
        raise CheckpointError(f"{path} has another format than {FORMAT_VERSION}; use the llmscale that wrote it.")
    # Checkpoints without a history belong to the first.
    history = {"number": body.pop("history", 1), "branches": body.pop("branches", [])}
    manifest = build(CheckpointManifest, {**body, "history": history}, _RULES, str(path))
    name = CHECKPOINT_NAME.fullmatch(folder.name)
    if name and int(name[2]) != manifest.step:
        raise CheckpointError(
            f"{path} says that this is the checkpoint of step {manifest.step}: the folder was renamed. Its name is "
            f"{checkpoint_name(manifest.step)}."
        )
    return manifest


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest. Raises CheckpointError."""
    return Checkpoint(folder, load_manifest(folder))


def save_pieces(folder: Path, pieces: Pieces) -> None:
    """Write pieces.json durably."""
    write_durably(folder / PIECES_NAME, json.dumps(asdict(pieces)) + "\n")


def load_pieces(folder: Path) -> Pieces | None:
    """Return the part of a checkpoint that is on this disk; None if all of it is. Raises CheckpointError."""
    path = folder / PIECES_NAME
    stored = load_if_there(path)
    if stored is None:
        return None
    return build(Pieces, stored, _RULES, str(path))


def load_if_there(path: Path, *, max_bytes: int = MAX_BYTES, not_finite: bool = False) -> dict[str, object] | None:
    """Return the JSON object in a checkpoint's file, or None without the file. Raises CheckpointError."""
    try:
        return load_json(path, Rules(CheckpointError, max_bytes=max_bytes, follow_links=False, not_finite=not_finite))
    except (FileNotFoundError, NotADirectoryError):
        return None


def signed_body(stored: Mapping[str, object], name: str, where: str) -> dict[str, object]:
    """Return the JSON object `name`. Raises CheckpointError when the hash beside it does not match."""
    if name not in stored:
        raise CheckpointError(f"{where} belongs to no checkpoint, or is damaged: it has no '{name}'.")
    body = stored.get(name)
    if not isinstance(body, dict) or hash_json(body) != stored.get("xxh3_128"):
        raise CheckpointError(f"{where} is damaged: its content does not match its hash.")
    return body


def parse_history(number: object, branches: object, where: str) -> History:
    """Parse a history from JSON values. Raises CheckpointError."""
    return build(History, {"number": number, "branches": branches}, _RULES, where)


def check_stored_name(name: object, where: str) -> None:
    """Raise CheckpointError for a file name that no save writes; the checkpoint is not trusted."""
    if not isinstance(name, str) or not _STORED_NAME.fullmatch(name):
        raise CheckpointError(
            f"{where} names the file {str(name)[:80]!r}. Legal: {STATE_NAME}, tensors.json, __0_0.distcp and so on."
        )


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is an integer of at least 0 (and not a boolean)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def find_damage(
    folder: Path, part: int = 0, parts: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
) -> str | None:
    """Return what is damaged in a folder's manifest or files, or None. See Checkpoint.find_damage."""
    try:
        return read_checkpoint(folder).find_damage(part, parts, progress)
    except CheckpointError as error:
        return str(error)


def _find_damage(path: Path, stored: StoredFile, progress: Callable[[int], object] | None = None) -> str | None:
    """Return what is damaged in a file, or None. Without `progress` only its size is checked."""
    try:
        num_bytes = check_regular(path, follow_links=False).st_size
        if num_bytes != stored.num_bytes:
            open_regular(path, follow_links=False).close()  # names a Git LFS pointer
            return f"{path} has {num_bytes} bytes instead of {stored.num_bytes}: it was cut short or overwritten."
        if progress and hash_content(path, "xxh3_128", progress) != stored.xxh3_128:
            return f"{path} does not match its hash: its content was altered."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    return None


def hash_json(body: dict) -> str:
    """Hash a JSON object independently of the order of its keys."""
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
