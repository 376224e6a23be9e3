"""DCP's file storage with its index as JSON: DCP itself pickles the index, and loading a pickle runs its code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from llmscale.errors import CheckpointError

INDEX_NAME = "tensors.json"


class JsonIndexWriter(FileSystemWriter):
    """Writes tensors as DCP does (`__RANK_0.distcp`, one torch.save a chunk) and the index as `tensors.json`.

    The index maps a tensor's name to its dtype, its flattened size and its chunks
    [start, elements, file, byte offset, bytes].
    """

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for written in results for result in written}
        index = {
            fqn: {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "size": entry.size.numel(),
                "chunks": [
                    [chunk.offsets[0], chunk.sizes[0], place.relative_path, place.offset, place.length]
                    for chunk in entry.chunks
                    for place in [places[MetadataIndex(fqn, chunk.offsets)]]
                ],
            }
            for fqn, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        path = Path(self.path) / INDEX_NAME
        with path.open("w") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())


class JsonIndexReader(FileSystemReader):
    """Reads what JsonIndexWriter wrote. Tensors are loaded with `weights_only`: nothing in a checkpoint is executed."""

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        index = load_index(Path(self.path))
        places: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, TensorStorageMetadata] = {}
        for fqn, entry in index.items():
            chunks = []
            for start, elements, file, offset, length in entry["chunks"]:
                chunks.append(ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([elements])))
                places[MetadataIndex(fqn, torch.Size([start]))] = _StorageInfo(file, offset, length)
            entries[fqn] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, entry["dtype"])),
                size=torch.Size([entry["size"]]),
                chunks=chunks,
            )
        # DCP's own type for this field is Any: whatever the storage layer wants to keep.
        return Metadata(state_dict_metadata=dict(entries), storage_data=places)


def load_index(folder: Path) -> dict[str, dict]:
    """The checkpoint's tensors by name. Raises CheckpointError when the index is missing or malformed."""
    try:
        return json.loads((folder / INDEX_NAME).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / INDEX_NAME} cannot be read: {error}.") from None
