"""A run in an object store: its description, its copy on this disk, and its checkpoints' tensors by range. No torch.

    URL/latest.json                                the run's holder, checkpoints, history and records
    URL/checkpoints/e00003-step-00000500/          a checkpoint's files; e00003: the third start wrote them
    URL/records/e00003/rank-00000/00000017.json    part 17 of what that start added to the run's other files

`latest.json` is changed by compare-and-swap and alone decides what belongs to the run. No listing is trusted, a
checkpoint exists once it is named there, and a trainer that was replaced cannot publish anything more.

The copy on this disk is a run folder, in COPIES/KIND/SCHEME/BUCKET/NAME. Its checkpoints may lack tensor files, which
are then fetched by range when they are loaded.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field
from xxhash import xxh3_128_hexdigest

from llmscale.checkpoint.inventory import find_checkpoints, point_best
from llmscale.checkpoint.manifest import (
    CHECKPOINT_NAME,
    CHECKPOINTS_NAME,
    LATEST_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    Pieces,
    check_stored_name,
    checkpoints_folder,
    hash_json,
    load_manifest,
    load_pieces,
    save_pieces,
    signed_body,
)
from llmscale.config.user_paths import is_view, url_of
from llmscale.data.storage.faults import Overtaken
from llmscale.data.storage.objects import Store, probe_conditions
from llmscale.errors import CheckpointError, ConfigError, LlmscaleError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import Rules, build, parse_json
from llmscale.untrusted.paths import open_own

INDEX_NAME = "latest.json"
RECORDS_NAME = "records"
FORMAT_VERSION = 1
#: Names in a copy that are this disk's alone.
TOKEN_NAME = ".holder"
_SEEN_NAME = ".remote.json"
#: Folder in a copy with links to the checkpoints that are being uploaded.
UPLOADS = ".uploads"
LOCAL_NAMES = frozenset((TOKEN_NAME, _SEEN_NAME, UPLOADS, ".lock", ".launch.lock", ".agents", CHECKPOINTS_NAME))
#: Small files in checkpoints/ that latest.json carries.
CARRIED = ("history.json", "kept.json")
_PART_NAME = re.compile(r"[\w.=+@,-]{1,200}", re.ASCII)
_MAX_STATE_BYTES = 64 << 20
#: Requests at a time, the longest range of one, and the largest gap between two tensors that it covers.
_THREADS = 8
_RANGE_BYTES = 32 << 20
_GAP_BYTES = 64 << 10
_FETCH_TRIES = 4
#: Seconds for which a view keeps the fetched tensors of a checkpoint while another one's are fetched.
_IN_USE_S = 3600.0


_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_Name = Annotated[str, Field(pattern=f"^({CHECKPOINT_NAME.pattern})$")]
_Folder = Annotated[str, Field(pattern=r"^e[0-9]{5,}-step-[0-9]{8,}(\.[0-9]+)?$")]
#: Seconds between two signs of life, unless the environment shortens them, and how many may be missed.
BEAT_VARIABLE = "LLMSCALE_BEAT_S"
_BEAT_S = 15.0
BEATS_MISSED = 4


@dataclass(frozen=True)
class Holder:
    """The trainer that may write to a run."""

    token: str
    """Random name of this start."""
    host: Annotated[str, Field(max_length=255)]
    pid: int
    boot: str
    """Boot and process namespace in which `pid` counts."""
    beat: int
    """Number that grows every `beat_s` seconds while the trainer runs."""
    beat_s: Annotated[float, Field(gt=0, le=600)]


@dataclass(frozen=True)
class RunIndex:
    """Content of latest.json."""

    id: str
    """Random name of the run."""
    epoch: _Count = 0
    """Starts so far."""
    last_token: str = ""
    """Token of the newest start, whether or not it has ended."""
    holder: Holder | None = None
    checkpoints: dict[_Name, _Folder] = field(default_factory=dict)
    """Folder below URL/checkpoints/ by the checkpoint's name, `step-00000500`."""
    carried: dict[Annotated[str, Field(pattern=r"^(history|kept)\.json$")], str] = field(default_factory=dict)
    """Text of the CARRIED files that exist."""
    records: dict[_Number, dict[_Number, _Count]] = field(default_factory=dict)
    """Number of parts by epoch and rank."""

    def encode(self) -> bytes:
        """Return the content of latest.json."""
        body = {"format": FORMAT_VERSION, **asdict(self)}
        return (json.dumps({"run": body, "xxh3_128": hash_json(body)}, indent=1) + "\n").encode()


def parse_index(contents: bytes, where: str) -> RunIndex:
    """Parse latest.json. Raises CheckpointError unless it is of this format and undamaged."""
    body = signed_body(parse_json(contents, Rules(CheckpointError), where), "run", where)
    if body.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"{where} has another format than {FORMAT_VERSION}; use the llmscale that wrote it.")
    return build(RunIndex, body, Rules(CheckpointError), where)


def _run_of(path: Path) -> Path:
    """Return the run of a path that may name one of its checkpoints."""
    return path.parent.parent if path.parent.name == CHECKPOINTS_NAME else path


def read_index(run: Path) -> RunIndex | None:
    """Return the description of the run whose copy is `run`; None if the URL holds no run. Raises LlmscaleError."""
    url = f"{url_of(run)}/{INDEX_NAME}"
    stored = Store(url).read_versioned(url)
    if stored:
        return parse_index(stored[0], url)
    return None


# The copy


def fetch_run(path: Path) -> Path:
    """Bring the copy of a remote run up to date, without tensors, and return `path`; a local path is left alone.

    Processes of one host take turns. Raises LlmscaleError when the store cannot be read, or a view's URL holds no run.
    """
    if url_of(path) is None:
        return path
    run = _run_of(path)
    seen = None
    failure = None
    for _ in range(_FETCH_TRIES):
        index = read_index(run)
        if index is None and is_view(run):
            raise CheckpointError(f"{url_of(run)} holds no run of llmscale: it has no {INDEX_NAME}.")
        if failure is not None and index == seen:
            break
        try:
            update_copy(run, index)
            return path
        except LlmscaleError as error:
            # The run's retention may have removed a checkpoint meanwhile.
            seen = index
            failure = error
    raise cast("LlmscaleError", failure)


def fetch_runs_below(folder: Path, report: Callable[[str], None]) -> None:
    """Bring the copies of the run at the URL of which `folder` is the copy, or of all runs one level below it, up to
    date; `report` gets a line for each that cannot be read. Raises DataError when the store cannot be read, and
    CheckpointError when it has nothing there."""
    url = cast("str", url_of(folder))
    names = Store(url, for_reading=True).list_names(url)
    if not names:
        raise CheckpointError(f"{url} holds no run of llmscale: it has no {INDEX_NAME}, and nothing is below it.")
    for run in [folder] if INDEX_NAME in names else [folder / name for name in names if is_record_name(name)]:
        try:
            if read_index(run) is not None:
                fetch_run(run)
        except CheckpointError as error:
            report(str(error))
    folder.mkdir(parents=True, exist_ok=True)


def is_held(run: Path) -> bool:
    """Return whether a trainer held the run when its copy was brought up to date."""
    seen = _read_seen(run)
    return seen is not None and seen.holder is not None


def update_copy(run: Path, index: RunIndex | None) -> None:
    """Make the copy on this disk what `index` describes; None: the store has no run.

    A trainer's copy that is newer, because nobody has trained the run since, is left alone. Raises LlmscaleError.
    """
    run.mkdir(parents=True, exist_ok=True)
    with _turn(run):
        seen = _read_seen(run)
        if index is None:
            if seen or read_token(run):
                raise CheckpointError(
                    f"{url_of(run)} holds no run, but {run} is this machine's copy of one. Is it the right store "
                    "(endpoint, account)? To begin a new run, remove that folder."
                )
        elif seen != index and (is_view(run) or read_token(run) != index.last_token):
            _fetch(run, index, seen if is_view(run) and seen and seen.id == index.id else None)


def _read_seen(run: Path) -> RunIndex | None:
    """Return the description with which the copy was brought up to date last."""
    with suppress(OSError, LlmscaleError):
        return parse_index((run / _SEEN_NAME).read_bytes(), _SEEN_NAME)
    return None


def has_all_records(run: Path, index: RunIndex | None) -> bool:
    """Return whether this disk's copy holds all records that `index` counts: it was fetched, or only it was written."""
    return index is None or _read_seen(run) == index or all(parts.keys() <= {"0"} for parts in index.records.values())


def read_token(run: Path) -> str | None:
    """Return the token of the newest start that trained this copy."""
    with suppress(OSError):
        return (run / TOKEN_NAME).read_text(encoding="utf-8", errors="replace").strip()
    return None


@contextmanager
def _turn(run: Path) -> Iterator[None]:
    with open(open_own(run.with_name(f".{run.name}.fetch"), os.O_RDWR | os.O_CREAT), "r+b") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(run: Path, index: RunIndex, seen: RunIndex | None) -> None:
    """Bring a copy up to date; it has the records of `seen`, or is built again."""
    url = cast("str", url_of(run))
    store = Store(url, for_reading=True)
    if seen is None:
        for path in run.iterdir():
            if path.name not in LOCAL_NAMES:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for part in _parts(store, url, index.records, seen.records if seen else {}):
        apply_part(run, part, f"{url}/{RECORDS_NAME}")
    _fetch_checkpoints(run, index, store, url)
    (run / TOKEN_NAME).unlink(missing_ok=True)
    write_durably(run / _SEEN_NAME, index.encode())


def _parts(
    store: Store, url: str, records: Mapping[str, Mapping[str, int]], seen: Mapping[str, Mapping[str, int]]
) -> Iterator[bytes]:
    """Yield the parts of the records that were not seen yet, in the order of the starts."""
    names = (
        record_url(url, int(epoch), int(rank), number)
        for epoch in sorted(records, key=int)
        for rank in sorted(records[epoch], key=int)
        for number in range(seen.get(epoch, {}).get(rank, 0), records[epoch][rank])
    )
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="records") as pool:
        while some := list(itertools.islice(names, 8 * _THREADS)):
            yield from pool.map(store.read_small, some)


def record_url(url: str, epoch: int, rank: int, number: int) -> str:
    """Return the URL of a part of the records."""
    return f"{url}/{RECORDS_NAME}/e{epoch:05d}/rank-{rank:05d}/{number:08d}.json"


def encode_part(changes: Iterable[tuple[str, int, bytes, bool]]) -> bytes:
    """Return a part of the records from (name, offset, bytes, whether the file ends there)."""
    return json.dumps(
        {"files": [[name, offset, base64.b64encode(body).decode(), ends] for name, offset, body, ends in changes]}
    ).encode()


def apply_part(run: Path, contents: bytes, where: str) -> None:
    """Write a part of the records into a run's copy. Raises CheckpointError for anything but files of a run."""
    files = parse_json(contents, Rules(CheckpointError), where).get("files")
    for entry in files if isinstance(files, list) else [files]:
        match entry:
            case [str(name), int(offset), str(body), bool(ends)] if is_record_name(name) and 0 <= offset < 1 << 50:
                with suppress(binascii.Error, OSError):
                    _write_at(run / name, offset, base64.b64decode(body, validate=True), ends=ends)
                    continue
        raise CheckpointError(f"{where} holds {str(entry)[:80]!r}, which is not a part of a run's file.")


def is_record_name(name: str) -> bool:
    """Return whether the records may hold a file of this path within the run folder."""
    parts = name.split("/")
    is_legal = all(_PART_NAME.fullmatch(part) and part not in (".", "..") for part in parts)
    return is_legal and parts[0] not in LOCAL_NAMES and len(parts) <= 8


def _write_at(path: Path, offset: int, body: bytes, *, ends: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(open_own(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        if offset > os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path}: a part of its records is missing in the store.")
        file.seek(offset)
        file.write(body)
        if ends:
            file.truncate()


def _fetch_checkpoints(run: Path, index: RunIndex, store: Store, url: str) -> None:
    """Bring the names and manifests of the copy's checkpoints up to date, and drop the tensors of others."""
    folder = checkpoints_folder(run)
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            pieces = load_pieces(path)
            if not pieces or pieces.remote is None or pieces.remote != index.checkpoints.get(path.name):
                shutil.rmtree(path)
            elif not pieces.files:
                drop_tensors(path)
        else:
            path.unlink()
    for name, remote in index.checkpoints.items():
        if not (folder / name).exists():
            _fetch_description(folder / name, remote, store, url)
    for name, text in index.carried.items():
        write_durably(folder / name, text)
    checkpoints = find_checkpoints(run)
    if checkpoints.current:
        write_durably(folder / LATEST_NAME, checkpoints.current[0].path.name + "\n")
    point_best(run, checkpoints.current)


def _fetch_description(final: Path, remote: str, store: Store, url: str) -> None:
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in (MANIFEST_NAME, STATE_NAME):
        write_durably(partial / name, store.read_small(f"{url}/{CHECKPOINTS_NAME}/{remote}/{name}", _MAX_STATE_BYTES))
    save_pieces(partial, Pieces((), remote))
    partial.rename(final)


def drop_tensors(checkpoint: Path) -> None:
    """Remove the tensor files of a checkpoint if the store holds them. Raises OSError, CheckpointError."""
    pieces = load_pieces(checkpoint)
    if pieces is not None and pieces.remote is not None:
        if pieces.files:
            save_pieces(checkpoint, replace(pieces, files=()))
        for path in checkpoint.glob("__*.distcp"):
            path.unlink(missing_ok=True)


# Tensors


@dataclass(frozen=True)
class Chunk:
    """A stored tensor, or a rank's part of it: a range of a file."""

    file: str
    offset: int
    num_bytes: int
    xxh3_128: str


def fetch_file(checkpoint: Path, name: str) -> None:
    """Fetch a whole file of a checkpoint that this disk lacks, verified. Raises LlmscaleError."""
    pieces = load_pieces(checkpoint)
    if pieces is None or pieces.remote is None or (checkpoint / name).exists():
        return
    stored = next((file for file in load_manifest(checkpoint).files if file.name == name), None)
    if stored is not None:
        chunk = Chunk(name, 0, stored.num_bytes, stored.xxh3_128)
        temporary = f".{name}.{os.getpid()}"
        _fetch_chunks(checkpoint, pieces.remote, [chunk], temporary)
        (checkpoint / temporary).replace(checkpoint / name)


def fetch_chunks(checkpoint: Path, chunks: Iterable[Chunk]) -> None:
    """Fetch the chunks that this disk lacks into sparse files, verified. Raises LlmscaleError."""
    pieces = load_pieces(checkpoint)
    if pieces is not None and pieces.remote is not None:
        _drop_unused(checkpoint)
        _fetch_chunks(checkpoint, pieces.remote, [chunk for chunk in chunks if chunk.file not in pieces.files])


def _drop_unused(checkpoint: Path) -> None:
    """Drop the tensors of a view's other checkpoints, unless a command may still read them."""
    for path in checkpoint.parent.glob("*/__*.distcp") if is_view(checkpoint) else ():
        with suppress(OSError):
            if path.parent != checkpoint and time.time() - path.stat().st_mtime > _IN_USE_S:
                path.unlink()


def _fetch_chunks(checkpoint: Path, remote: str, chunks: list[Chunk], target: str | None = None) -> None:
    url = cast("str", url_of(_run_of(checkpoint)))
    store = Store(url, for_reading=True)
    place = f"{url}/{CHECKPOINTS_NAME}/{remote}"
    sizes = {file.name: file.num_bytes for file in load_manifest(checkpoint).files}
    for name in sorted({chunk.file for chunk in chunks}):
        check_stored_name(name, place)
        there = store.head(f"{place}/{name}").size_bytes
        if there != sizes.get(name):
            raise CheckpointError(f"{place}/{name} has {there:,} bytes instead of {sizes.get(name, 0):,}.")
        with open(open_own(checkpoint / (target or name), os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(there)

    def fetch(group: list[Chunk]) -> None:
        for attempt in range(1, _FETCH_TRIES + 1):
            begin = group[0].offset
            end = group[-1].offset + group[-1].num_bytes
            data = store.read(f"{place}/{group[0].file}", begin, end)
            bodies = [data[chunk.offset - begin : chunk.offset - begin + chunk.num_bytes] for chunk in group]
            if all(xxh3_128_hexdigest(body) == chunk.xxh3_128 for body, chunk in zip(bodies, group, strict=True)):
                break
            if attempt == _FETCH_TRIES:
                raise CheckpointError(f"{place}/{group[0].file} does not match its hashes: its content was altered.")
        with open(open_own(checkpoint / (target or group[0].file), os.O_RDWR), "r+b") as file:
            for body, chunk in zip(bodies, group, strict=True):
                file.seek(chunk.offset)
                file.write(body)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch") as pool:
        list(pool.map(fetch, _ranges(chunks)))


def _ranges(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Yield groups of neighbouring chunks, each to be fetched by one request."""
    group: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file, chunk.offset)):
        if group:
            end = group[-1].offset + group[-1].num_bytes
            is_next = chunk.file == group[0].file and 0 <= chunk.offset - end <= _GAP_BYTES
            if not is_next or chunk.offset + chunk.num_bytes - group[0].offset > _RANGE_BYTES:
                yield group
                group = []
        group.append(chunk)
    if group:
        yield group


def boot_name() -> str:
    """Return what a process id needs to be unique: this boot, and this container's process namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return secrets.token_hex(8)


def _beat_seconds() -> float:
    """Return the seconds between two signs of life. Raises ConfigError for an illegal BEAT_VARIABLE."""
    text = os.environ.get(BEAT_VARIABLE) or str(_BEAT_S)
    with suppress(ValueError):
        if 0.05 <= float(text) <= 600:
            return float(text)
    raise ConfigError(f"{BEAT_VARIABLE} is {text[:40]!r}. Legal: seconds from 0.05 to 600; default: {_BEAT_S:g}.")


class Lease:
    """Rank 0's hold on a run in a store."""

    def __init__(self, store: Store, url: str, index: RunIndex, version: str) -> None:
        """`url` is that of latest.json, `version` its own."""
        self._store = store
        self._url = url
        self._version = version
        self.index = index
        """Content of latest.json as this trainer wrote it."""
        self._turn = threading.Lock()

    def update(self, change: Callable[[RunIndex], RunIndex]) -> None:
        """Write a changed description with a sign of life. Raises Overtaken when another trainer has the run."""
        with self._turn:
            changed = change(self.index)
            if changed.holder is not None:
                changed = replace(changed, holder=replace(changed.holder, beat=changed.holder.beat + 1))
            try:
                self._version = self._store.write_if(self._url, changed.encode(), self._version)
            except Overtaken:
                # An earlier write, whose answer never came, may have arrived.
                stored = self._store.read_versioned(self._url)
                if stored is None or parse_index(stored[0], self._url).epoch != self.index.epoch:
                    raise
                self._version = self._store.write_if(self._url, changed.encode(), stored[1])
            self.index = changed

    def release(self) -> None:
        """Let another start have the run at once."""
        self.update(lambda index: replace(index, holder=None))


def take_lease(run: Path, report: Callable[[str], None]) -> tuple[Lease, RunIndex | None]:
    """Take the run whose copy is `run`; return the lease and the description before. Waits for a holder that may be
    gone. Raises ConfigError when another trainer holds it."""
    url = str(url_of(run))
    store = Store(url)
    index_url = f"{url}/{INDEX_NAME}"
    before, version = _wait_until_free(store, url, report) or (None, "")
    if before is None:
        probe_conditions(url)
    token = secrets.token_hex(8)
    holder = Holder(token, platform.node(), os.getpid(), boot_name(), 0, _beat_seconds())
    index = before or RunIndex(secrets.token_hex(8))
    index = replace(index, epoch=index.epoch + 1, last_token=token, holder=holder)
    try:
        version = store.write_if(index_url, index.encode(), version)
    except Overtaken:
        raise _in_use(url, "another start, which was faster") from None
    return Lease(store, index_url, index, version), before


def _wait_until_free(store: Store, url: str, report: Callable[[str], None]) -> tuple[RunIndex, str] | None:
    """Return the newest description of a run and its version, None for a new run, once no trainer holds it.

    Raises ConfigError when its holder is alive.
    """
    first = None
    end = 0.0
    while stored := store.read_versioned(f"{url}/{INDEX_NAME}"):
        index = parse_index(stored[0], url)
        holder = index.holder
        if holder is None or (holder.boot == boot_name() and not os.path.exists(f"/proc/{holder.pid}")):
            return index, stored[1]
        named = f"process {holder.pid} on host {holder.host}"
        if first is None:
            first = holder
            limit_s = BEATS_MISSED * holder.beat_s
            end = time.monotonic() + limit_s
            report(f"{url} is held by {named}; waiting {limit_s:.0f} s for a sign of life before taking it over")
        elif holder != first:
            raise _in_use(url, named)
        elif time.monotonic() >= end:
            return index, stored[1]
        time.sleep(min(holder.beat_s, max(0.0, end - time.monotonic())))
    return None


def _in_use(url: str, who: str) -> ConfigError:
    return ConfigError(f"--run {url} is in use by {who}. Wait for it to end, or name another run.")


def remove_folders(store: Store, url: str, folders: Iterable[str]) -> None:
    """Remove folders of a run that latest.json does not name any more. Raises DataError."""
    for folder in folders:
        for stored in store.list_objects(f"{url}/{folder}"):
            store.delete(stored.url)


def prune_run(run: Path, names: Sequence[str], report: Callable[[str], None]) -> None:
    """Remove checkpoints from a run in a store. Raises ConfigError while a trainer holds the run, and DataError."""
    url, (lease, before) = str(url_of(run)), take_lease(run, report)
    try:
        known = before.checkpoints if before else {}
        remaining = {name: remote for name, remote in known.items() if name not in names}
        # A trainer's copy of it remains the newest.
        token = before.last_token if before else ""
        lease.update(lambda index: replace(index, checkpoints=remaining, last_token=token))
        gone = [f"{CHECKPOINTS_NAME}/{remote}" for name, remote in known.items() if name in names]
        remove_folders(Store(url), url, gone)
    finally:
        lease.release()
