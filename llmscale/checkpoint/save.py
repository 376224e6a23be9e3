"""Save checkpoints: copied out at once, written in the background, visible only when whole."""

from __future__ import annotations

import json
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

from llmscale.checkpoint.fragments import Fragment, FragmentSavePlanner
from llmscale.checkpoint.json_storage import JsonIndexWriter
from llmscale.checkpoint.manifest import (
    LATEST_NAME,
    STATE_NAME,
    CheckpointManifest,
    StoredFile,
    checkpoint_name,
    checkpoints_folder,
    hash_file,
    save_manifest,
    sync_folder,
    write_durably,
)
from llmscale.checkpoint.retention import apply_retention

#: Space beyond the tensors that a save asks for: index, manifest, state, and the file system's own overhead.
SPARE_BYTES = 64 * 2**20
#: Tenths of a second that a network file system may take to show a new folder to another host.
_VISIBLE_TRIES = 50


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, copied out of the engine."""

    step: int
    tokens_seen: int
    zero_stage: int
    precision: str
    state: dict[str, object]
    """Plain values for state.json, the same on every rank."""
    fragments: dict[str, Fragment]


def copy_out(fragments: dict[str, Fragment]) -> dict[str, Fragment]:
    """The fragments on the host, independent of what training does next. Waits for the device once."""
    copies = {
        key: replace(fragment, local=fragment.local.to("cpu", non_blocking=True, copy=True))
        for key, fragment in fragments.items()
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


class CheckpointSaver:
    """Writes snapshots, one at a time. Every rank calls every method at the same step.

    A save that fails (disk full, no permission, a rank that cannot see the folder) is reported and leaves the run and
    the older checkpoints as they were.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep_last: int,
        keep_every: int,
        in_background: bool,
        report: Callable[[str], None],
    ) -> None:
        """`report` is called on every rank with one line per outcome; the caller decides who prints."""
        self._run, self._keep_last, self._keep_every = run, keep_last, keep_every
        self._in_background, self._report = in_background, report
        # Its own group: a background save's messages must not mix with the training loop's.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self.last_saved_step: int | None = None
        """Step of the newest checkpoint that this saver finished."""

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot; waits for the previous one first. Collective."""
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

    def _write(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        folder = checkpoints_folder(self._run)
        partial = folder / f".{checkpoint_name(snapshot.step)}.partial"
        try:
            self._prepare(partial, snapshot)
            dcp.save(
                snapshot.fragments,
                storage_writer=JsonIndexWriter(partial, thread_count=1, sync_files=True),
                planner=FragmentSavePlanner(),
                process_group=self._group,
            )
            self._commit(partial, folder / checkpoint_name(snapshot.step), snapshot)
        except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception but a BaseException
            # Whatever went wrong on one rank was raised on all of them: DCP and _together see to that.
            self._discard(partial)
            self._report(
                f"WARNING: the checkpoint of step {snapshot.step} was NOT saved: {_first_cause(error)}. "
                "Training goes on; older checkpoints are untouched."
            )
            return
        self.last_saved_step = snapshot.step
        self._report(f"saved {folder / checkpoint_name(snapshot.step)} in {time.perf_counter() - began:.1f} s")

    def _prepare(self, partial: Path, snapshot: Snapshot) -> None:
        """Make the folder and see that there is room, before a byte is written."""
        needed = sum(fragment.local.nbytes for fragment in snapshot.fragments.values())
        total = torch.tensor(needed)
        dist.all_reduce(total, group=self._group)

        def prepare() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            free = shutil.disk_usage(partial).free
            # At stage 0 every rank holds everything, and one copy is written.
            wanted = (needed if snapshot.zero_stage == 0 else int(total)) + SPARE_BYTES
            if free < wanted:
                raise OSError(
                    f"{partial.parent} has {free / 2**30:.2f} GiB free and {wanted / 2**30:.2f} GiB are needed; "
                    "free some space or lower --keep-last"
                )

        self._together(prepare if dist.get_rank() == 0 else None)
        self._together(lambda: _check_visible(partial))

    def _commit(self, partial: Path, final: Path, snapshot: Snapshot) -> None:
        """Hash, write the manifest, rename, move `latest`: the main rank, when every rank has finished writing."""
        own = self._together(lambda: [hash_file(path) for path in sorted(partial.glob(f"__{dist.get_rank()}_*"))])
        files = [file for files_of_rank in own for file in files_of_rank]

        def commit() -> None:
            write_durably(partial / STATE_NAME, json.dumps(snapshot.state, indent=1))
            others = [hash_file(partial / STATE_NAME), hash_file(partial / "tensors.json")]
            save_manifest(partial, _build_manifest(snapshot, (*files, *others)))
            if final.exists():
                # The same step of an abandoned history; the new one replaces it only now that it is whole.
                trash = final.with_name(f".{final.name}.deleted")
                final.rename(trash)
                shutil.rmtree(trash)
            partial.rename(final)
            sync_folder(final.parent)
            write_durably(final.parent / LATEST_NAME, final.name + "\n")
            apply_retention(self._run, self._keep_last, self._keep_every)

        self._together(commit if dist.get_rank() == 0 else None)

    def _together(self, action: Callable[[], object] | None) -> list:
        """Run `action` where there is one, and raise on every rank when it failed on any. Returns the ranks'
        results."""
        result: object = None
        failure: str | None = None
        try:
            result = action() if action else None
        except Exception as error:
            failure = _first_cause(error)
        outcomes: list[tuple[object, str | None]] = [(None, None)] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, failure), group=self._group)
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise OSError(f"rank {rank}: {text}")
        return [value for value, _ in outcomes]

    def _discard(self, partial: Path) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def _check_visible(partial: Path) -> None:
    """The main rank made the folder just now; who cannot see it does not share its file system."""
    # A network file system may show a new name late; opening the parent asks the server again.
    for _ in range(_VISIBLE_TRIES):
        os.listdir(partial.parent) if partial.parent.is_dir() else None
        if partial.is_dir():
            return
        time.sleep(0.1)
    raise OSError(
        f"{partial.parent} on host {os.uname().nodename} is not the main rank's folder. Every node must write to "
        "one shared file system: put --run on NFS, Lustre or the like"
    )


def _build_manifest(snapshot: Snapshot, files: tuple[StoredFile, ...]) -> CheckpointManifest:
    return CheckpointManifest(
        step=snapshot.step,
        tokens_seen=snapshot.tokens_seen,
        world_size=dist.get_world_size(),
        zero_stage=snapshot.zero_stage,
        precision=snapshot.precision,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files=tuple(sorted(files, key=lambda file: file.name)),
    )


def _first_cause(error: BaseException) -> str:
    """One line from an exception; DCP wraps those of all ranks in one."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(sorted(failures.items())))
        return f"rank {rank}: {_first_cause(cause)}"
    return " ".join(f"{error}".split()) or type(error).__name__
