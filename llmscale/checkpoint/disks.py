"""Share a checkpoint among disks, where nodes have none in common.

Every disk has its own ranks' tensors and the descriptions of all checkpoints. While training saves, only the list of
files is exchanged. A start gives every disk the descriptions that it lacks, and the tensor files that its ranks need,
as messages between the ranks.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from llmscale.checkpoint.inventory import find_checkpoints, free_name, set_aside_existing
from llmscale.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    Checkpoint,
    Pieces,
    StoredFile,
    checkpoints_folder,
    hash_file,
    load_pieces,
    read_checkpoint,
    save_pieces,
)
from llmscale.checkpoint.remote_run import CARRIED
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_each_disk
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import MAX_BYTES
from llmscale.untrusted.paths import read_regular

#: Bytes of one message.
_MESSAGE_BYTES = 64 << 20
#: A checkpoint's history, small files, and folder in the run's store.
_Description = tuple[int, dict[str, bytes], str | None]
#: How often, and how many seconds apart, a rank looks for a file that another one has written.
_LOOKS = 10
_PAUSE_S = 0.1


def find_disks(run: Path, group: dist.ProcessGroup) -> Disks:
    """Return which ranks see the same folder `run`, which is created. Collective.

    Raises CheckpointError on every rank if a rank cannot write to its folder.
    """
    rank = dist.get_rank(group)
    mains = [-1] * dist.get_world_size(group)
    while -1 in mains:
        main = mains.index(-1)
        if rank == main:
            own = on_all_ranks(group, _write_mark, run)
        else:
            own = on_all_ranks(group, lambda: None)
        mark = gather(group, own)[main]
        sees = gather(group, mains[rank] == -1 and mark is not None and _sees(run / mark))
        mains = [main if seen else known for known, seen in zip(mains, sees, strict=True)]
        if own is not None:
            (run / own).unlink(missing_ok=True)
    return Disks(tuple(mains))


def _write_mark(run: Path) -> str | None:
    """Write a file for other ranks to see, and return its name. Raises CheckpointError."""
    mark = run / f".seen-{secrets.token_hex(8)}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_durably(mark, "")
    except OSError as error:
        raise CheckpointError(f"{run} cannot be written: {error.strerror or error}.") from None
    return mark.name


def _sees(mark: Path) -> bool:
    # A network file system may show a new file late; listing the folder asks the server again.
    for number in range(_LOOKS):
        with suppress(OSError):
            if mark.name in os.listdir(mark.parent):
                return True
        if number < _LOOKS - 1:
            time.sleep(_PAUSE_S)
    return False


def share_descriptions(run: Path, group: dist.ProcessGroup, disks: Disks) -> None:
    """Give every disk the descriptions of all checkpoints of the run, and its history. Collective.

    Raises CheckpointError on every rank when a disk cannot be read or written.
    """
    if disks.is_one:
        return
    of_disks = gather(group, on_each_disk(group, disks, lambda: _descriptions(run)))
    # The disk whose run has gone back most often knows the current history.
    newest = max(of_disks, key=lambda of_disk: of_disk[0])
    known: dict[str, _Description] = {}
    for _, checkpoints, _ in of_disks:
        for name, (history, files, remote) in checkpoints.items():
            # A disk of which the run was killed may not know yet that the store has the checkpoint.
            if name not in known or (history, remote or "") > (known[name][0], known[name][2] or ""):
                known[name] = (history, files, remote)

    def write() -> None:
        own = _descriptions(run)
        folder = checkpoints_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in newest[2].items():
            if own[2].get(name) != text:
                write_durably(folder / name, text)
        for name, (_, files, remote) in known.items():
            if name not in own[1] or own[1][name][1][MANIFEST_NAME] != files[MANIFEST_NAME]:
                _write_description(folder / name, files, remote)
            elif own[1][name][2] != remote:
                held = [file.name for file in read_checkpoint(folder / name).files_here()]
                save_pieces(folder / name, Pieces(tuple(file for file in held if file != STATE_NAME), remote))

    on_each_disk(group, disks, write)


def _descriptions(run: Path) -> tuple[int, dict[str, _Description], dict[str, bytes]]:
    """Return the number of a disk's history, its checkpoints, and the run's small files."""
    listing = find_checkpoints(run)
    checkpoints = {}
    for saved in [*listing.current, *listing.abandoned]:
        files = {name: read_regular(saved.path / name, MAX_BYTES) for name in (MANIFEST_NAME, STATE_NAME)}
        pieces = load_pieces(saved.path)
        checkpoints[saved.path.name] = (saved.history.number, files, pieces.remote if pieces else None)
    folder = checkpoints_folder(run)
    carried = {name: read_regular(folder / name, MAX_BYTES) for name in CARRIED if (folder / name).is_file()}
    return listing.history.number, checkpoints, carried


def _write_description(final: Path, files: dict[str, bytes], remote: str | None) -> None:
    set_aside_existing(final)
    partial = free_name(final.with_name(f".{final.name}.partial"))
    partial.mkdir()
    for name, contents in files.items():
        write_durably(partial / name, contents)
    save_pieces(partial, Pieces((), remote))
    partial.rename(final)


def find_missing(checkpoint: Checkpoint, group: dist.ProcessGroup) -> str | None:
    """Return which file of a checkpoint is on no disk and in no store, or None. Collective."""
    folder = checkpoint.path

    def look() -> tuple[set[str], bool]:
        pieces = load_pieces(folder)
        names = {file.name for file in checkpoint.files_here() if (folder / file.name).is_file()}
        return names, pieces is not None and pieces.remote is not None

    listing = gather(group, on_all_ranks(group, look))
    if any(is_remote for _, is_remote in listing):
        return None
    here = set().union(*(names for names, _ in listing))
    missing = sorted({file.name for file in checkpoint.manifest.files} - here)
    return f"{folder / missing[0]} is on no disk of these nodes." if missing else None


def share_files(folder: Path, names: Iterable[str], group: dist.ProcessGroup, disks: Disks) -> None:
    """Bring the files of a checkpoint that this rank needs to its disk, from any disk that has them. Collective.

    Raises CheckpointError on every rank when a file is on no disk, cannot be written, or arrives damaged.
    """
    if disks.is_one:
        return
    pieces = load_pieces(folder)
    if pieces is not None and pieces.remote is not None:
        return
    rank = dist.get_rank(group)
    checkpoint = read_checkpoint(folder)
    stored = {file.name: file for file in checkpoint.manifest.files}
    held = gather(group, [file.name for file in checkpoint.files_here()])
    wanted = gather(group, sorted(set(names) - set(held[rank])))
    for name in sorted(set().union(*wanted)):
        holders = [main for main in sorted(set(disks.mains)) if name in held[main]]
        if not holders:
            raise CheckpointError(f"{folder / name} is on no disk of these nodes. Name another checkpoint.")
        receivers = {disks.mains[other] for other, needs in enumerate(wanted) if name in needs}
        _send(folder, stored[name], holders[0], group, receives=rank in receivers)


def _send(folder: Path, file: StoredFile, source: int, group: dist.ProcessGroup, *, receives: bool) -> None:
    """Broadcast a file from the rank `source`; ranks that receive it keep it. Collective."""
    path = folder / file.name
    partial = path.with_name(f".{file.name}.partial")
    for begin in range(0, file.num_bytes, _MESSAGE_BYTES):
        part = torch.empty(min(_MESSAGE_BYTES, file.num_bytes - begin), dtype=torch.uint8)

        def read(begin: int = begin, part: torch.Tensor = part) -> None:
            if dist.get_rank(group) == source:
                with path.open("rb") as opened:
                    opened.seek(begin)
                    opened.readinto(part.numpy().data)

        def write(begin: int = begin, part: torch.Tensor = part) -> None:
            if receives:
                with partial.open("ab" if begin else "wb") as opened:
                    opened.write(part.numpy().data)

        on_all_ranks(group, read)
        dist.broadcast(part, source, group=group)
        on_all_ranks(group, write)

    def keep() -> None:
        if receives:
            if hash_file(partial).xxh3_128 != file.xxh3_128:
                raise CheckpointError(f"{path} does not match its hash: it was damaged on a disk or on its way.")
            partial.replace(path)
            pieces = load_pieces(folder) or Pieces(())
            save_pieces(folder, replace(pieces, files=(*pieces.files, file.name)))

    on_all_ranks(group, keep)
