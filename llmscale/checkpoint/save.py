"""Save checkpoints: copied to the host at once, written in the background, renamed when complete."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llmscale.checkpoint.inventory import commit_checkpoint, free_name
from llmscale.checkpoint.manifest import (
    SPARE_BYTES,
    CheckpointManifest,
    History,
    Pieces,
    StoredFile,
    Validation,
    checkpoint_name,
    checkpoints_folder,
    hash_file,
)
from llmscale.checkpoint.tensor_files import INDEX_NAME, Fragment, FragmentSavePlanner, JsonIndexWriter
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably

#: Tenths of a second to wait until a network file system shows a new folder to another host.
_VISIBLE_TRIES = 50


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, independent of the engine."""

    step: int
    tokens_seen: int
    zero_stage: int
    precision: str
    state: dict[str, object]
    """Plain values for state.json, the same on every rank."""
    fragments: dict[str, Fragment]
    validation: Validation | None = None
    """Validation after this step, if there was one."""


def copy_out(fragments: dict[str, Fragment]) -> dict[str, Fragment]:
    """Copy fragments to the host, independent of further training. Synchronises with the device."""
    copies = {
        key: replace(fragment, local=fragment.local.to("cpu", non_blocking=True, copy=True))
        for key, fragment in fragments.items()
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


class CheckpointSaver:
    """Writes snapshots, one at a time. Every rank calls every method at the same step.

    A failed save (disk full, no permission, a rank that cannot see the folder) is reported, and leaves the run and
    older checkpoints unchanged.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep_last: int,
        keep_every: int,
        in_background: bool,
        report: Callable[[str], None],
        disks: Disks,
        history: History | None = None,
        check_run_folder: Callable[[], None] = lambda: None,
        on_saved: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """`report` is called on every rank with one line per outcome; the caller decides who prints. `history` is the
        history of new checkpoints, `disks` are those that they are written to. `check_run_folder` raises OSError on a
        disk whose run folder no longer belongs to this run. `on_saved` gets every finished checkpoint, on every rank.
        """
        self._run = run
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.history = history or History()
        """The history of new checkpoints."""
        self._disks = disks
        self._in_background = in_background
        self._report = report
        self._check_run_folder = check_run_folder
        self._on_saved = on_saved
        # Its own group: a background save's messages must not mix with the training loop's.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self.last_saved_step: int | None = None
        """Step of the newest checkpoint that this saver finished."""
        self.failure: str | None = None
        """Why the newest save failed; None if it did not."""

    def save(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot after the previous one is written. Collective."""
        self.wait()
        if not self._in_background:
            self._write(snapshot)
            return
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait until nothing is being written, and give the process group back. Collective."""
        self.wait()
        dist.destroy_process_group(self._group)

    def _write(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        final = checkpoints_folder(self._run) / checkpoint_name(snapshot.step)
        partial: Path | None = None
        try:
            partial = folder = self._prepare(final, snapshot)
            on_all_ranks(self._group, lambda: _check_visible(folder))
            dcp.save(
                snapshot.fragments,
                # Tensors are on the host. Without 0 the writer waits for a stream of this thread's device, which is GPU
                # 0 on every rank, and opens a context there.
                storage_writer=JsonIndexWriter(partial, thread_count=1, sync_files=True, per_thread_copy_ahead=0),
                planner=FragmentSavePlanner(),
                process_group=self._group,
            )
            problems = self._commit(partial, snapshot)
        except (Exception, dcp.CheckpointException) as error:  # DCP's own is a BaseException
            # DCP and collectives.py raise a rank's error on all ranks.
            if partial is not None:
                self._discard(partial)
            self.failure = _first_cause(error)
            self._report(
                f"WARNING: the checkpoint of step {snapshot.step} was NOT saved: {self.failure}. "
                "Training continues; older checkpoints are untouched."
            )
            return
        self.last_saved_step = snapshot.step
        self.failure = None
        self._on_saved(final)
        self._report(f"saved {final} in {time.perf_counter() - began:.1f} s")
        for problem in problems:
            self._report(f"WARNING: {final} is saved, but {problem}")

    def _prepare(self, final: Path, snapshot: Snapshot) -> Path:
        """Create the folder to write into and check the free space. Collective."""
        needed = sum(fragment.local.nbytes for fragment in snapshot.fragments.values())
        of_ranks = gather(self._group, needed)
        rank = dist.get_rank()
        total = sum(of_ranks[neighbour] for neighbour in self._disks.neighbours(rank))

        def prepare() -> Path:
            self._check_run_folder()
            final.parent.mkdir(parents=True, exist_ok=True)
            partial = free_name(final.with_name(f".{final.name}.partial"))
            partial.mkdir()
            free = shutil.disk_usage(partial).free
            # At stage 0 every rank holds everything, but one copy is written.
            wanted = (needed if snapshot.zero_stage == 0 else total) + SPARE_BYTES
            if free < wanted:
                partial.rmdir()
                raise CheckpointError(
                    f"{partial.parent} has {free / 2**30:.2f} GiB free and {wanted / 2**30:.2f} GiB are needed; "
                    f"free some space, keep fewer checkpoints, or give up abandoned ones (llmscale checkpoint prune "
                    f"{self._run})"
                )
            return partial

        return on_each_disk(self._group, self._disks, prepare)

    def _commit(self, partial: Path, snapshot: Snapshot) -> list[str]:
        """Hash the files on every rank, then commit on rank 0; returns a line per later failure. Collective."""

        def hash_own() -> list[StoredFile]:
            return [hash_file(path) for path in sorted(partial.glob(f"__{dist.get_rank()}_*"))]

        of_ranks = gather(self._group, on_all_ranks(self._group, hash_own))
        files = tuple(itertools.chain.from_iterable(of_ranks))
        manifest = on_main_rank(self._group, lambda: _build_manifest(snapshot, files, self.history))
        pieces = None
        index = b""
        rank = dist.get_rank()
        if not self._disks.is_one:
            index = on_main_rank(self._group, (partial / INDEX_NAME).read_bytes)
            own = [file.name for neighbour in self._disks.neighbours(rank) for file in of_ranks[neighbour]]
            pieces = Pieces((INDEX_NAME, *own))

        def commit() -> list[str]:
            self._check_run_folder()
            if rank and pieces is not None:
                write_durably(partial / INDEX_NAME, index)
            return commit_checkpoint(
                self._run,
                partial,
                manifest,
                snapshot.state,
                keep_last=self._keep_last,
                keep_every=self._keep_every,
                pieces=pieces,
            )

        return on_each_disk(self._group, self._disks, commit)

    def _discard(self, partial: Path) -> None:
        rank = dist.get_rank()
        if self._disks.mains[rank] == rank:
            shutil.rmtree(partial, ignore_errors=True)


def _check_visible(partial: Path) -> None:
    """Raise CheckpointError when this rank cannot see the folder that rank 0 has created."""
    # A network file system may show a new name late; opening the parent queries the server again.
    for _ in range(_VISIBLE_TRIES):
        if partial.parent.is_dir():
            os.listdir(partial.parent)
        if partial.is_dir():
            return
        time.sleep(0.1)
    raise CheckpointError(
        f"{partial.parent} on host {os.uname().nodename} is not the folder that it was at the start. Is its file "
        "system still mounted?"
    )


def _build_manifest(snapshot: Snapshot, files: tuple[StoredFile, ...], history: History) -> CheckpointManifest:
    return CheckpointManifest(
        step=snapshot.step,
        tokens_seen=snapshot.tokens_seen,
        world_size=dist.get_world_size(),
        zero_stage=snapshot.zero_stage,
        precision=snapshot.precision,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files=files,
        history=history,
        validation=snapshot.validation,
    )


def _first_cause(error: BaseException) -> str:
    """Return one line about an exception; DCP wraps those of all ranks in one."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(sorted(failures.items())))
        return f"rank {rank}: {_first_cause(cause)}"
    return " ".join(f"{error}".split()) or type(error).__name__
