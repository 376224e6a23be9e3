"""Publish a run in its store while it trains: one trainer at a time, checkpoints in the background, records in parts.

A saved checkpoint is linked aside, so that retention cannot remove it, and uploaded by all ranks. The write of
`latest.json` that names it publishes it. When the store does not answer, training continues, and the newest checkpoint
is published once it does.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from llmscale.checkpoint.inventory import is_of_run
from llmscale.checkpoint.manifest import (
    CHECKPOINT_NAME,
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    Checkpoint,
    Pieces,
    checkpoints_folder,
    load_pieces,
    read_checkpoint,
    save_pieces,
    step_of,
)
from llmscale.checkpoint.remote_run import (
    CARRIED,
    LOCAL_NAMES,
    RECORDS_NAME,
    TOKEN_NAME,
    UPLOADS,
    Lease,
    RunIndex,
    drop_tensors,
    encode_part,
    has_all_records,
    is_record_name,
    record_url,
    remove_folders,
    take_lease,
    update_copy,
)
from llmscale.config.user_paths import url_of
from llmscale.data.storage import faults
from llmscale.data.storage.faults import Overtaken
from llmscale.data.storage.objects import Store
from llmscale.engine.collectives import gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError, LlmscaleError
from llmscale.files.atomic_write import write_durably

#: Seconds between two parts of the records, beside those with every checkpoint: at first, and after a day.
_RECORDS_S = 300.0
_LONGEST_S = 900.0
#: Seconds for which the end of training waits for the store.
_END_S = 600.0
#: Files up to this size are sent whole when they change; of longer ones that grow what was added.
_SMALL_BYTES = 1 << 16
#: A rank has saved again before it could upload.
_REPLACED = "a newer checkpoint is about to be published"
_OF_RANK = re.compile(r"rank-(\d+)", re.ASCII)
_PART_BYTES = 16 << 20


class RecordUploads:
    """Sends what one rank's disk added to the run's files since the start, at first all of them. One per disk."""

    def __init__(
        self, run: Path, epoch: int, rank: int, neighbours: Sequence[int], *, is_complete: bool = False
    ) -> None:
        """`neighbours` are the ranks on this disk. Rank 0's disk sends all files, others those of their ranks.

        `is_complete` if the disk has the records of all earlier starts.
        """
        self._is_complete = is_complete
        self._run = run
        self._epoch = epoch
        self._rank = rank
        self._neighbours = neighbours
        self._url = str(url_of(run))
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of change of each file when its newest part was sent."""
        self.num_parts = 0
        """Parts that the store holds."""
        self._turn = threading.Lock()

    @property
    def replaces_older(self) -> bool:
        """Return whether the store needs no parts of earlier starts any more."""
        return self._is_complete and bool(self._sent)

    def send(self, put: Callable[[str, bytes], None]) -> None:
        """Send what changed since the last time, with `put`(URL, contents). Raises DataError."""
        with self._turn:
            part: list[tuple[str, int, bytes, bool]] = []
            sent = dict(self._sent)
            for change in itertools.chain(self._changes(sent), [None]):
                if part and (change is None or sum(len(body) for _, _, body, _ in part) >= _PART_BYTES):
                    put(record_url(self._url, self._epoch, self._rank, self.num_parts), encode_part(part))
                    self.num_parts += 1
                    part.clear()
                if change is not None:
                    part.append(change)
            self._sent = sent

    def _changes(self, sent: dict[str, tuple[int, int]]) -> Iterator[tuple[str, int, bytes, bool]]:
        """Yield changed ranges as (file, offset, bytes, whether the file ends there), and update what is `sent`."""
        for name in sorted(self._names()):
            with suppress(OSError), open(self._run / name, "rb") as file:
                status = os.fstat(file.fileno())
                size = status.st_size
                state = (status.st_size, status.st_mtime_ns)
                num_sent, _ = before = sent.get(name, (size, 0))
                if state == before:
                    continue
                begin = num_sent if size > _SMALL_BYTES and num_sent < size else 0
                for offset in range(begin, max(1, size), _PART_BYTES):
                    file.seek(offset)
                    body = file.read(min(_PART_BYTES, size - offset))
                    yield name, offset, body, begin == 0 and offset + len(body) >= size
                    if len(body) < _PART_BYTES:  # the last one, or the file was cut meanwhile
                        break
                sent[name] = state

    def _names(self) -> Iterator[str]:
        """Yield the paths within the run folder of the files that this disk sends."""
        for folder, folders, names in os.walk(self._run):
            if folder == str(self._run):
                folders[:] = [name for name in folders if name not in LOCAL_NAMES]
            for path in (Path(folder, name) for name in names):
                name = path.relative_to(self._run).as_posix()
                owner = _OF_RANK.search(name)
                is_own = self._rank == 0 or (owner is not None and int(owner[1]) in self._neighbours)
                if is_own and is_record_name(name) and path.is_file() and not path.is_symlink():
                    yield name


def local_name(remote: str) -> str:
    """Return the name in the run of the checkpoint in a folder of the store, eEPOCH-NAME or eEPOCH-NAME.NUMBER."""
    return remote.partition("-")[2].partition(".")[0]


def _remote_of(checkpoint: Path) -> str | None:
    with suppress(CheckpointError):
        pieces = load_pieces(checkpoint)
        return pieces.remote if pieces else None
    return None


class RunPublisher:
    """Publishes checkpoints and records of a run in its store, in a thread of every rank.

    The threads have a process group of their own: rank 0's says what is published next, the others wait for it.
    """

    def __init__(
        self,
        run: Path,
        world: World,
        lease: Lease | None,
        records: RecordUploads | None,
        *,
        epoch: int,
        keep_every: int,
        report: Callable[[str], None],
        on_lost: Callable[[str], object],
    ) -> None:
        """`lease` is rank 0's, `records` those of the first rank of each disk. `on_lost` hears once that another
        trainer has taken the run over."""
        self._run = run
        self._world = world
        self._lease = lease
        self._records = records
        self._epoch = epoch
        self._report = report
        self._on_lost = on_lost
        self._keep_every = keep_every
        self._url = str(url_of(run))
        self._aside = run / UPLOADS / f"rank-{world.rank:05d}"
        self._store = Store(self._url)
        self._ending = threading.Event()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._saved: list[str] = []
        self._uploading = ""
        self._waiting: dict[str, None] = {}
        """Checkpoints that are to be published, in the order of saving."""
        self._counts: dict[str, int] = {}
        self._said = ""
        self.dropping = threading.Lock()
        """Held while tensors of published checkpoints are removed from this disk, and by whoever reads them."""
        self.problem = ""
        """Why the newest checkpoint is not published; empty if it is."""
        self._links = dist.new_group(backend="gloo")
        # Its messages may wait as long as training lasts.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=3650))
        self._thread = threading.Thread(target=self._main if lease else self._follow, name="publish", daemon=True)

    def start(self, unpublished: Path | None) -> None:
        """Begin to publish, with the newest checkpoint that an earlier start could not publish. Collective."""
        if self._lease:
            with suppress(LlmscaleError):
                self.remove_unnamed()
            threading.Thread(target=self._beat, name="beat", daemon=True).start()
        if unpublished is not None:
            self.saved(unpublished)
        self._thread.start()

    def saved(self, checkpoint: Path) -> None:
        """Publish a checkpoint that was saved. Collective."""
        number = sum(local_name(remote) == checkpoint.name for remote in self._saved)
        # A step may be saved again after a rollback.
        self._saved.append(f"e{self._epoch:05d}-{checkpoint.name}" + (f".{number}" if number else ""))
        try:
            on_all_ranks(self._links, lambda: self._link(checkpoint, self._aside / self._saved[-1]))
        except Exception as error:  # of any rank
            self.problem = str(error)
            self._tell(self.problem)
            return
        # During an outage links must not fill the disk: the newest waits, and those that --keep-every keeps.
        self._waiting[self._saved[-1]] = None
        for remote in [*self._waiting][:-1]:
            if not self._keep_every or step_of(Path(local_name(remote))) % self._keep_every:
                self._waiting.pop(remote, None)  # None: published meanwhile
        for remote in self._saved[:-1]:
            if remote != self._uploading and remote not in self._waiting:
                shutil.rmtree(self._aside / remote, ignore_errors=True)
        self._wake.set()

    def _link(self, checkpoint: Path, aside: Path) -> None:
        """Link the files of a checkpoint that this rank uploads, and its manifest."""
        aside.mkdir(parents=True)
        neighbours = self._world.disks.neighbours(self._world.rank)
        saved = read_checkpoint(checkpoint)
        manifest = saved.manifest
        tensors = [file.name for file in saved.files_here() if file.name.startswith("__")]
        others = [file.name for file in manifest.files if not file.name.startswith("__")]
        own = tensors[neighbours.index(self._world.rank) :: len(neighbours)]
        for name in (*own, *(others if self._lease else ()), MANIFEST_NAME):
            try:
                os.link(checkpoint / name, aside / name)
            except OSError:  # a file system without links
                shutil.copyfile(checkpoint / name, aside / name)

    def finish(self) -> None:
        """Wait until the last checkpoint is published. Collective. Raises CheckpointError after _END_S without."""
        self._ending.set()
        self._wake.set()
        self._thread.join()
        problem = on_main_rank(self._world.control, lambda: self.problem)
        if problem:
            raise CheckpointError(
                f"training has ended, but its last checkpoint is not in {self._url}: {problem} It is in {self._run}; "
                "the same command on this machine publishes it."
            )

    def close(self) -> None:
        """Send the last records and release the run, after an error too. Not collective."""
        if self._lease is None:
            return
        last = threading.Thread(target=self._close, daemon=True)
        last.start()
        last.join(faults.STALL_S)

    def _close(self) -> None:
        self._closing.set()
        with suppress(LlmscaleError, OSError):
            self._send_records()
            self._update(lambda index: replace(index, holder=None))

    # Rank 0

    def _beat(self) -> None:
        assert self._lease is not None and self._lease.index.holder is not None
        beat_s = self._lease.index.holder.beat_s
        while not self._closing.wait(beat_s) and self._lease:
            self._attempt(lambda: self._update(lambda index: index))

    def _main(self) -> None:
        try:
            self._publish_all()
        except Exception as error:  # another rank is gone, which the training loop reports
            self.problem = self.problem or str(error)

    def _publish_all(self) -> None:
        next_records, end = (began := time.monotonic()), None
        while True:
            self._wake.wait(faults.RETRY_PAUSES_S[1] if self._waiting else max(0.0, next_records - time.monotonic()))
            self._wake.clear()
            end = end or (time.monotonic() + _END_S if self._ending.is_set() else None)
            if self._waiting and self._lease:
                self._publish_next()
            is_done = end is not None and (not self._waiting or time.monotonic() > end or not self._lease)
            if is_done or time.monotonic() >= next_records:
                self._attempt(self._send_records)
                # A month has no more than 3,000 parts beside those with checkpoints.
                pause_s = max(_RECORDS_S, min(_LONGEST_S, (time.monotonic() - began) / 100))
                next_records = time.monotonic() + pause_s
            if is_done:
                break
        self._broadcast(None)

    def _attempt(self, action: Callable[[], object]) -> str:
        """Run a request of rank 0; return why it failed, reported once, or an empty string."""
        try:
            action()
        except Overtaken:
            problem = f"another trainer has taken {self._url} over."
            if self._lease and not self._closing.is_set():
                self._on_lost(problem)
            self._lease = None
            self.problem = problem
            return problem
        except (LlmscaleError, OSError) as error:
            self._tell(str(error))
            return str(error)
        return ""

    def _tell(self, problem: str) -> None:
        if not self._said:
            self._report(f"WARNING: {problem} Training continues; checkpoints are kept on this disk meanwhile.")
        self._said = problem

    def _update(self, change: Callable[[RunIndex], RunIndex]) -> None:
        """Write latest.json, with the small files and the number of records. Raises Overtaken."""
        lease = self._lease
        if lease is None:
            raise Overtaken(self.problem)
        folder = checkpoints_folder(self._run)
        carried = {name: (folder / name).read_text() for name in CARRIED if (folder / name).is_file()}
        records = self._records
        assert records is not None
        counts = self._counts | ({"0": records.num_parts} if records.num_parts else {})

        def with_records(index: RunIndex) -> RunIndex:
            older = {} if records.replaces_older else index.records
            return replace(change(index), carried=carried, records={**older, str(self._epoch): counts})

        lease.update(with_records)

    def _publish_next(self) -> None:
        """Publish the oldest checkpoint that waits, with all ranks."""
        remote = [*self._waiting][0]  # noqa: RUF015  the other thread may change it
        self._broadcast(remote)
        results = self._upload_round(remote)
        self._counts |= {str(rank): count for rank, (_, count) in enumerate(results) if count}
        problem = next((problem for problem, _ in results if problem), "")
        if problem and problem != _REPLACED:
            self._tell(problem)
        self.problem = problem or self._attempt(lambda: self._publish(remote))
        if not self.problem:
            if self._said:
                self._report(f"{self._url} is written again: {local_name(remote)} is published")
            self._said = ""
        published = "" if self.problem else remote
        self._broadcast(published)
        self._clear_up(published)

    def _publish(self, remote: str) -> None:
        manifest = self._aside / remote / MANIFEST_NAME
        self._store.upload(manifest, f"{self._url}/{CHECKPOINTS_NAME}/{remote}/{MANIFEST_NAME}")
        folder = checkpoints_folder(self._run)
        local = {path.name: _remote_of(path) for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)}
        expired: set[str] = set()

        def add(index: RunIndex) -> RunIndex:
            known = set(index.checkpoints.values())
            named = {name: there for name, there in index.checkpoints.items() if name in local}
            # Saving a step of another history has renamed its older checkpoint.
            named |= {name: there for name, there in local.items() if there in known}
            named[local_name(remote)] = remote
            expired.update(known - set(named.values()))
            return replace(index, checkpoints=named)

        self._update(add)
        self._report(f"published {self._url}/{CHECKPOINTS_NAME}/{remote}")
        self._remove(f"{CHECKPOINTS_NAME}/{remote}" for remote in expired)

    def _remove(self, folders: Iterable[str]) -> None:
        with suppress(LlmscaleError):  # the next start removes it
            remove_folders(self._store, self._url, folders)

    def remove_unnamed(self) -> None:
        """Remove what earlier starts uploaded and latest.json does not name, or not any more."""
        assert self._lease is not None
        index = self._lease.index
        starts = {f"e{int(epoch):05d}" for epoch in index.records}
        for folder, named in ((CHECKPOINTS_NAME, set(index.checkpoints.values())), (RECORDS_NAME, starts)):
            for name in self._store.list_names(f"{self._url}/{folder}"):
                if name not in named and name.startswith("e") and name < f"e{self._epoch:05d}":
                    self._remove([f"{folder}/{name}"])

    # Every rank

    def _follow(self) -> None:
        with suppress(RuntimeError):  # rank 0 is gone, which the training loop reports
            while (name := self._broadcast(None)) is not None:
                self._upload_round(name)
                self._clear_up(self._broadcast("") or "")

    def _broadcast(self, name: str | None) -> str | None:
        """Return rank 0's `name` on every rank. Collective."""
        return on_main_rank(self._group, lambda: name)

    def _upload_round(self, remote: str) -> list[tuple[str, int]]:
        """Upload this rank's files of a checkpoint; return each rank's problem and number of records. Collective."""
        problem = ""
        count = 0
        self._uploading = remote
        try:
            if not (self._aside / remote).is_dir():
                raise CheckpointError(_REPLACED)
            for path in sorted((self._aside / remote).iterdir()):
                if path.name != MANIFEST_NAME:
                    self._store.upload(path, f"{self._url}/{CHECKPOINTS_NAME}/{remote}/{path.name}")
            if self._records:
                self._send_records()
                count = self._records.num_parts
        except Exception as error:  # the other ranks wait for the answer
            problem = str(error)
        return gather(self._group, (problem, count))

    def _clear_up(self, published: str) -> None:
        """Note that a checkpoint is published, and drop the tensors of older ones on this disk."""
        if published:
            with suppress(OSError, LlmscaleError), self.dropping:
                self._note(published)
            self._waiting.pop(published, None)  # None: a newer one has replaced it
        remote = self._uploading
        self._uploading = ""
        if remote not in self._waiting:
            shutil.rmtree(self._aside / remote, ignore_errors=True)

    def _note(self, published: str) -> None:
        rank = self._world.rank
        folder = checkpoints_folder(self._run)
        checkpoint = folder / local_name(published)
        # Its name may belong to a newer one by now.
        is_same = os.path.samefile(checkpoint / MANIFEST_NAME, self._aside / published / MANIFEST_NAME)
        if is_same and self._world.disks.mains[rank] == rank:
            names = [file.name for file in read_checkpoint(checkpoint).files_here()]
            save_pieces(checkpoint, Pieces(tuple(name for name in names if name != STATE_NAME), published))
            for path in folder.iterdir():
                if CHECKPOINT_NAME.fullmatch(path.name) and path != checkpoint:
                    drop_tensors(path)

    def _send_records(self) -> None:
        if self._records:
            self._records.send(self._store.write)


def open_publisher(
    run: Path, keep_every: int, world: World, report: Callable[[str], None], on_lost: Callable[[str], object]
) -> RunPublisher | None:
    """Take a run in a store, bring its copies up to date, and return what publishes it; None for a local run.

    Collective. Raises ConfigError when another trainer holds the run, DataError when the store cannot be reached.
    """
    if url_of(run) is None:
        return None
    leases: list[Lease] = []

    def take() -> tuple[RunIndex | None, int, str]:
        lease, before = take_lease(run, report)
        leases.append(lease)
        return before, lease.index.epoch, lease.index.last_token

    before, epoch, token = on_main_rank(world.control, take)

    def update() -> bool:
        shutil.rmtree(run / UPLOADS, ignore_errors=True)
        update_copy(run, before)
        is_complete = has_all_records(run, before)
        write_durably(run / TOKEN_NAME, token + "\n")
        return is_complete

    try:
        is_complete = on_each_disk(world.control, world.disks, update)
    except BaseException:
        for lease in leases:
            with suppress(LlmscaleError):
                lease.release()
        raise
    records = None
    neighbours = world.disks.neighbours(world.rank)
    if world.disks.mains[world.rank] == world.rank:
        records = RecordUploads(run, epoch, world.rank, neighbours, is_complete=is_complete)
    return RunPublisher(
        run,
        world,
        leases[0] if leases else None,
        records,
        epoch=epoch,
        keep_every=keep_every,
        report=report,
        on_lost=on_lost,
    )


def find_unpublished(source: Checkpoint | None, run: Path) -> Path | None:
    """Return the checkpoint to resume if it is this run's and the store does not have it."""
    if source is None or not is_of_run(source.path, run):
        return None
    pieces = load_pieces(source.path)
    return None if pieces and pieces.remote else source.path
