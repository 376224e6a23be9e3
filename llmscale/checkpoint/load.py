"""Load a checkpoint into an engine of any ZeRO stage, world size and precision, also from disks that are not shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.checkpoint.inventory import (
    FoundCheckpoints,
    explain_no_checkpoint,
    find_checkpoints,
    free_name,
    report_passed_over,
    set_aside_existing,
)
from llmscale.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    Checkpoint,
    Pieces,
    StoredFile,
    checkpoints_folder,
    find_damage,
    hash_file,
    load_pieces,
    read_checkpoint,
    save_pieces,
)
from llmscale.checkpoint.remote_run import CARRIED, fetch_chunks
from llmscale.checkpoint.tensor_files import (
    DTYPES,
    INDEX_NAME,
    WEIGHTS,
    Fragment,
    Index,
    check_sizes,
    engine_fragments,
    fill_fragments,
    load_index,
    stored_chunks,
)
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_each_disk
from llmscale.engine.zero_shards import (
    MASTER,
    group_scalars,
    materialise_optimizer_state,
    refresh_low_precision_weights,
    set_group_scalars,
    write_back,
)
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import MAX_BYTES
from llmscale.untrusted.paths import read_regular

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def find_newest_good(
    listing: FoundCheckpoints, run: Path, group: dist.ProcessGroup, disks: Disks, report: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a run's current history; None when the run has no checkpoints.

    `listing` is rank 0's. Collective: the ranks share the hashing. `report` gets a line for every skipped entry.
    Raises CheckpointError when no checkpoint is undamaged: only the user may decide to start from scratch.
    """
    report_passed_over(listing, report)
    for folder, damage in listing.damaged:
        report(f"WARNING: {folder.name} is damaged and passed over: {damage}")
    for checkpoint in listing.current:
        # The copy of a remote run may have another path on another node.
        checkpoint = replace(checkpoint, path=checkpoints_folder(run) / checkpoint.path.name)
        problem = find_damage_together(checkpoint, group, disks)
        if problem is None:
            return checkpoint
        report(f"WARNING: {checkpoint.path.name} is damaged and passed over: {problem}")
    if listing.current or listing.abandoned or listing.damaged or listing.origin:
        raise CheckpointError(explain_no_checkpoint(listing, run))
    nearly = [path for path, _ in listing.passed_over if (path / MANIFEST_NAME).is_file()]
    if nearly:
        raise CheckpointError(
            f"{checkpoints_folder(run)} has nothing to continue from but {nearly[0].name}, which is passed over (see "
            f"above). Take it with --resume {nearly[0]}, or begin at step 0 with --resume none."
        )
    return None


def find_damage_together(checkpoint: Checkpoint, group: dist.ProcessGroup, disks: Disks) -> str | None:
    """Find damage, with the hashing shared by the ranks of each disk; all return the same. Collective.

    `checkpoint` is as rank 0 has read it; another disk has its own manifest.
    """
    rank = dist.get_rank(group)
    neighbours = disks.neighbours(rank)
    part, parts = neighbours.index(rank), len(neighbours)

    def look() -> str | None:
        return checkpoint.find_damage(part, parts) if disks.is_one else find_damage(checkpoint.path, part, parts)

    findings = gather(group, on_all_ranks(group, look))
    return next((finding for finding in findings if finding), None) or find_missing(checkpoint, group)


def load_engine(
    engine: DeepSpeedEngine,
    folder: Path,
    scalars: Mapping[str, Mapping[str, float]],
    group: dist.ProcessGroup,
    disks: Disks,
    *,
    with_frozen: bool = True,
    steps_taken: int | None = None,
) -> str | None:
    """Load weights, optimizer states, buffers and, `with_frozen`, frozen parameters. Collective.

    `scalars` are the optimizer's numbers by group, as group_scalars returns them. `steps_taken` are the optimizer's
    steps, where parameters may have had none of them: those without a gradient at stage 0, and all before the first
    step. Such parameters have no states, which begin at zero. None requires all states.

    Returns a line if the engine keeps master weights and states in another type than the checkpoint, else None. Raises
    CheckpointError on every rank, before a weight changes, when the checkpoint and the engine do not have the same
    tensors.
    """
    share_files(folder, [INDEX_NAME], group, disks)
    stored = on_all_ranks(group, lambda: load_index(folder))
    has_optimizer_state = any(not key.startswith(WEIGHTS) for key in stored)
    if has_optimizer_state or steps_taken:
        materialise_optimizer_state(engine)
    fragments = engine_fragments(engine, with_frozen=with_frozen)
    unstepped = {} if steps_taken is None else _unstepped(stored, fragments, steps_taken)
    filled = {key: part for key, part in fragments.items() if key not in unstepped}
    check_nothing_is_dropped(stored, fragments, folder)
    if steps_taken is not None:
        own = group_scalars(engine)
        scalars = {name: scalars.get(name, dict.fromkeys(own[name], 0.0)) for name in own} | {**scalars}
    if has_optimizer_state or scalars:
        check_same_scalars(scalars, group_scalars(engine), folder)
    _fill(folder, stored, filled, group, disks)
    for part in unstepped.values():
        part.local.zero_()
    write_back(engine, fragments)
    set_group_scalars(engine, scalars)
    refresh_low_precision_weights(engine)
    return _describe_cast(stored, fragments)


def _unstepped(stored: Iterable[str], wanted: Mapping[str, Fragment], steps_taken: int) -> dict[str, Fragment]:
    """Return the optimizer states that are not stored, of kinds that are, or of all kinds before the first step."""
    known = {*stored}
    kinds = {key.partition("/")[0] for key in known}
    return {
        key: part
        for key, part in wanted.items()
        if not key.startswith(WEIGHTS) and key not in known and (not steps_taken or key.partition("/")[0] in kinds)
    }


def _describe_cast(stored: Mapping[str, Mapping], fragments: Mapping[str, Fragment]) -> str | None:
    key = next(key for key in fragments if key.startswith(MASTER))
    before, now = DTYPES[stored[key]["dtype"]], fragments[key].local.dtype
    if before == now:
        return None
    names = f"master weights and optimizer states change from {_name(before)} to {_name(now)}"
    is_exact = torch.promote_types(before, now) == now
    return f"{names}: {'they are taken over exactly' if is_exact else 'they are rounded once'}"


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


def check_nothing_is_dropped(stored: Iterable[str], wanted: Iterable[str], folder: Path) -> None:
    """Raise CheckpointError when a checkpoint holds tensors that the engine does not have."""
    surplus = sorted(set(stored) - set(wanted))
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise CheckpointError(
            f"{folder} holds '{surplus[0]}'{more}, which this run has no place for: it belongs to another model or "
            "optimizer."
        )


def check_same_scalars(
    stored: Mapping[str, Mapping[str, float]], own: Mapping[str, Mapping[str, float]], folder: Path
) -> None:
    """Raise CheckpointError unless both hold the same numbers (Adam's `step`) for the same optimizer groups."""
    names, own_names = ({f"{group}.{key}" for group in of for key in of[group]} for of in (stored, own))
    if names != own_names:
        name = sorted(names ^ own_names)[0]
        where = "is stored and this run has no place for it" if name in names else "is not stored"
        raise CheckpointError(
            f"{folder}: the optimizer's number '{name}' {where}: the checkpoint belongs to another optimizer."
        )
    wrong = [value for numbers in stored.values() for value in numbers.values() if not math.isfinite(value)]
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]!r} is not a finite number, as optimizer states must be.")


def load_weights(
    engine: DeepSpeedEngine,
    folder: Path,
    group: dist.ProcessGroup,
    disks: Disks,
    *,
    keeps: Callable[[str], bool] = lambda key: False,
) -> None:
    """Load weights and buffers only; the optimizer keeps its new state. Collective.

    Weights for whose '<state>/<name>' `keeps` returns True, such as adapters, stay as they are.
    """
    own = {key: value for key, value in engine_fragments(engine).items() if key.startswith(WEIGHTS) and not keeps(key)}
    share_files(folder, [INDEX_NAME], group, disks)
    stored = on_all_ranks(group, lambda: load_index(folder))
    fragments = {_stored_key(key, stored): value for key, value in own.items()}
    check_nothing_is_dropped((key for key in stored if key.startswith(WEIGHTS)), fragments, folder)
    _fill(folder, stored, fragments, group, disks)
    write_back(engine, own)
    refresh_low_precision_weights(engine)


def _stored_key(key: str, stored: Container[str]) -> str:
    """Return the key of the same weights in a checkpoint, in whose run they may have been frozen, or trained."""
    kind, _, name = key.partition("/")
    other = f"{'frozen' if kind == MASTER else MASTER}/{name}"
    return other if key not in stored and other in stored else key


def _fill(
    folder: Path, stored: Index, fragments: Mapping[str, Fragment], group: dist.ProcessGroup, disks: Disks
) -> None:
    """Bring what this rank needs of a checkpoint to its disk, from the store or from other disks, and read it.

    Collective. Raises CheckpointError on every rank; tensors that do not match are refused before any is changed.
    """
    on_all_ranks(group, lambda: check_sizes(stored, fragments))
    chunks = [
        chunk
        for key, fragment in fragments.items()
        for chunk in stored_chunks(stored[key], fragment.start, fragment.local.numel())
    ]
    on_all_ranks(group, lambda: fetch_chunks(folder, chunks))
    share_files(folder, {chunk.file for chunk in chunks}, group, disks)
    on_all_ranks(group, lambda: fill_fragments(folder, stored, fragments))


# Nodes without a shared disk: every disk has its own ranks' tensors and the descriptions of all checkpoints. While
# training saves, only the list of files is exchanged. A start gives every disk the descriptions that it lacks, and the
# tensor files that its ranks need, as messages between the ranks.

#: Bytes of one message.
_MESSAGE_BYTES = 64 << 20
#: A checkpoint's history, small files, and folder in the run's store.
_Description = tuple[int, dict[str, bytes], str | None]


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
    listing, checkpoints = find_checkpoints(run), {}
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
