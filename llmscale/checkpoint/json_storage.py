"""DCP's file storage with its index as JSON: DCP itself pickles the index, and loading a pickle runs its code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, cast

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

from llmscale.checkpoint.manifest import check_stored_name
from llmscale.checkpoint.tensor_archive import DTYPES, check_archive
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import check_regular

INDEX_NAME = "tensors.json"
#: 50 bytes a chunk: ZeRO-3's 1,000 parameters and three states on 1,000 ranks make 150 MB.
_MAX_INDEX_BYTES = 1 << 30


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
    """Reads what JsonIndexWriter wrote. Tensors are loaded with `weights_only`: nothing in a checkpoint is executed.

    Nor does a tensor take more memory than its bytes in the file: see tensor_archive.py.
    """

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        check_archive(file, sinfo.offset, sinfo.length, f"{self.path}/{sinfo.relative_path}")
        return super()._slice_file(file, sinfo)

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
                properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
                size=torch.Size([entry["size"]]),
                chunks=chunks,
            )
        # DCP's own type for this field is Any: whatever the storage layer wants to keep.
        return Metadata(state_dict_metadata=dict(entries), storage_data=places)


def load_index(folder: Path) -> dict[str, dict]:
    """The checkpoint's tensors by name, each covered by its chunks exactly once.

    Sizes decide what is allocated, so they are held against the files: no element without its bytes there, and no byte
    that is counted twice. Raises CheckpointError when the index is missing, malformed, or says anything else.
    """
    path = folder / INDEX_NAME
    try:
        index = load_json(path, Rules(CheckpointError, max_bytes=_MAX_INDEX_BYTES, follow_links=False))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} cannot be read: it is missing.") from None
    extents: dict[str, list[tuple[int, int]]] = {}
    for name, entry in index.items():
        for file, offset, length in _chunk_places(entry, f"{path}, tensor {name[:200]!r},"):
            extents.setdefault(file, []).append((offset, length))
    for file, places in extents.items():
        _check_extents(folder / file, sorted(places))
    return cast(dict[str, dict], index)


def _chunk_places(entry: object, where: str) -> list[tuple[str, int, int]]:
    """File, offset and length in bytes of a tensor's chunks. Raises CheckpointError when they do not make it up."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "size", "chunks"} or str(entry["dtype"]) not in DTYPES:
        raise CheckpointError(f"{where} has no size, no chunks or no dtype of {', '.join(DTYPES)}.")
    itemsize = DTYPES[str(entry["dtype"])].itemsize
    found = []
    for chunk in entry["chunks"] if isinstance(entry["chunks"], list) else [entry["chunks"]]:
        match chunk:
            case [int(start), int(elements), str(file), int(offset), int(length)]:
                check_stored_name(file, where)
                if elements > 0 and offset >= 0 and length >= elements * itemsize:
                    found.append((start, elements, file, offset, length))
                    continue
        raise CheckpointError(f"{where} has the chunk {str(chunk)[:100]}, which none can be.")
    end = 0
    for start, elements, *_ in sorted(found):
        if start != end:
            raise CheckpointError(f"{where} has a chunk at element {start} where one at {end} should follow.")
        end += elements
    if end != entry["size"]:
        raise CheckpointError(f"{where} has {end} elements in its chunks instead of {str(entry['size'])[:40]}.")
    return [(file, offset, length) for _, _, file, offset, length in found]


def _check_extents(file: Path, places: list[tuple[int, int]]) -> None:
    """That the chunks lie within the file and not within each other."""
    try:
        num_bytes = check_regular(file, follow_links=False).st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    ends = [0, *(offset + length for offset, length in places)]
    if ends[-1] > num_bytes or any(offset < end for (offset, _), end in zip(places, ends, strict=False)):
        raise CheckpointError(f"{file.parent / INDEX_NAME} places tensors beyond the end of {file.name} or twice.")
