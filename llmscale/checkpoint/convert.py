"""Checkpoints of one kind as another, without an engine, a GPU or the ranks that wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llmscale.checkpoint.deepspeed_files import open_deepspeed_checkpoint
from llmscale.checkpoint.deepspeed_pickles import CLIENT_STATE, is_deepspeed_checkpoint, tag_folder, unpack
from llmscale.checkpoint.engine_state import read_engine_state
from llmscale.checkpoint.inventory import open_checkpoint
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME, MANIFEST_NAME
from llmscale.checkpoint.plain_values import to_json
from llmscale.checkpoint.portable import PortableCheckpoint, StoredGroup, StoredTensor
from llmscale.checkpoint.save import CheckpointSaver, Snapshot
from llmscale.checkpoint.tensor_files import DTYPES, find_elements, load_index
from llmscale.engine.collectives import Disks
from llmscale.errors import CheckpointError

_KEEP_ALL = 1 << 30


class Imported(NamedTuple):
    """A checkpoint of llmscale's, made of DeepSpeed's."""

    path: Path
    left_out: tuple[str, ...]
    """Entries of client_state that are not plain values."""


def import_deepspeed(folder: Path, run: Path, tag: str | None = None) -> Imported:
    """Write DeepSpeed's checkpoint, of any ranks, as llmscale's, hashed and complete. Raises CheckpointError."""
    source = _open_deepspeed(folder, tag).with_plain_names()
    extra, left_out = _plain_entries(source.client_state)
    state = replace(source.engine_state, extra=extra)
    lines: list[str] = []
    fragments: Any = {key: _Pieces(tensor) for key, tensor in source.tensors.items()}
    snapshot = Snapshot(source.step, 0, source.zero_stage, source.precision, state.as_dict(), fragments)
    with _one_rank():
        saver = CheckpointSaver(
            run, keep_last=_KEEP_ALL, keep_every=0, in_background=False, report=lines.append, disks=Disks((0,))
        )
        saver.save(snapshot)
        saver.close()
    if saver.failure is not None:
        raise CheckpointError(f"{run}: the checkpoint was not written: {saver.failure}.")
    return Imported(open_checkpoint(run, step=source.step).path, left_out)


def open_portable(folder: Path, *, tag: str | None = None, step: int | None = None) -> PortableCheckpoint:
    """Open DeepSpeed's checkpoint, or llmscale's of a loop of one's own, verified. Raises CheckpointError."""
    place = tag_folder(folder, tag)
    if place is not None and is_deepspeed_checkpoint(place):
        return open_deepspeed_checkpoint(place)
    own = folder if place is None else place
    if not (own / CHECKPOINTS_NAME).is_dir() and not (own / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{own} is not a checkpoint: it has neither DeepSpeed's files (latest, or *_model_states.pt) nor "
            f"llmscale's ({CHECKPOINTS_NAME}, or {MANIFEST_NAME})."
        )
    checkpoint = open_checkpoint(own, step=step)
    if damage := checkpoint.find_damage():
        raise CheckpointError(damage)
    state = read_engine_state(checkpoint)
    packed = state.extra.get(CLIENT_STATE)
    return PortableCheckpoint(
        path=checkpoint.path,
        zero_stage=checkpoint.manifest.zero_stage,
        ranks=checkpoint.manifest.world_size,
        precision=state.precision,
        step=state.global_steps,
        tensors={key: _map_tensor(checkpoint.path, key, entry) for key, entry in load_index(checkpoint.path).items()},
        groups=tuple(
            StoredGroup(group.parameters, group.settings, state.optimizer_scalars.get(group.name, {}))
            for group in state.groups
        ),
        shapes={name: list(shape) for name, shape in state.shapes.items()},
        tied=state.tied,
        scheduler=state.scheduler,
        loss_scaler=dict(state.loss_scaler or {}),
        skipped_steps=state.skipped_steps,
        global_samples=state.global_samples,
        client_state=unpack(packed, ()) if isinstance(packed, str) else state.extra,
        has_frozen=state.has_frozen,
    )


def _open_deepspeed(folder: Path, tag: str | None) -> PortableCheckpoint:
    place = tag_folder(folder, tag)
    if place is None:
        raise CheckpointError(
            f"{folder} has no file 'latest': name the folder of a tag, such as {folder}/global_step100."
        )
    return open_deepspeed_checkpoint(place)


def _plain_entries(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the entries that llmscale's checkpoints can hold, and the names of the others."""
    plain = {}
    left_out = []
    for key, value in values.items():
        try:
            to_json(value, key)
        except CheckpointError:
            left_out.append(key)
        else:
            plain[key] = value
    return plain, tuple(left_out)


@contextmanager
def _one_rank() -> Iterator[None]:
    """Be the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Pieces:
    """A stored tensor for torch.distributed.checkpoint: each piece is a chunk, so nothing is put together in memory."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.local = stored.pieces[0][1]

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [self._write_item(fqn, start, piece) for start, piece in self._stored.pieces]

    def _write_item(self, fqn: str, start: int, piece: Tensor) -> WriteItem:
        chunk = ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([piece.numel()]))
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(piece),
            size=torch.Size([self._stored.total]),
        )
        return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    def at(self, start: int) -> Tensor:
        """Return the piece that begins at an element."""
        return next(piece for begin, piece in self._stored.pieces if begin == start).clone()


def _map_tensor(folder: Path, key: str, entry: Any) -> StoredTensor:
    """Map a tensor of llmscale's files."""
    dtype = DTYPES[entry["dtype"]]
    pieces = []
    for begin, elements, name, offset, num_bytes, *_ in entry["chunks"]:
        if elements == 0:
            continue
        with (folder / name).open("rb") as file:
            start = find_elements(file, offset, num_bytes, entry["dtype"], elements, f"{folder / name}, '{key}',")
        content = np.memmap(folder / name, np.uint8, "c", start, (elements * dtype.itemsize,))
        pieces.append((begin, torch.from_numpy(content).view(dtype)))
    return StoredTensor(entry["size"], tuple(sorted(pieces, key=lambda piece: piece[0])))
