"""A checkpoint's tensor files: written by torch.distributed.checkpoint (DCP), with an index in JSON, and read in place.

DCP pickles its index, and loading a pickle runs its code; hence the index in JSON. Tensors are read without unpickling:
every archive must be one that torch.save writes for a flat tensor, and then its numbers are consecutive bytes.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmscale.checkpoint.manifest import check_stored_name, load_if_there, load_manifest, load_pieces
from llmscale.checkpoint.remote_run import Chunk, fetch_chunks, fetch_file
from llmscale.engine.zero_layout import ShardView
from llmscale.engine.zero_shards import MASTER, state_views
from llmscale.errors import CheckpointError, LlmscaleError
from llmscale.untrusted.paths import check_regular, open_regular, unreadable_as

#: Types of stored tensors, by torch's names.
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}
#: Storage classes that the pickle in an archive names, by the names in DTYPES.
_STORAGES = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage",
    "float64": "DoubleStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
#: torch writes 200 to 500 bytes.
_MAX_PICKLE_BYTES = 4096
#: Header of a member in a ZIP archive, with the lengths of the name and the extra field after it.
_ZIP_HEADER = struct.Struct("<26xHH")
INDEX_NAME = "tensors.json"
#: 50 bytes a chunk: ZeRO-3's 1,000 parameters and three states on 1,000 ranks make 150 MB.
_MAX_INDEX_BYTES = 1 << 30
#: Prefixes of trained weights, of frozen ones and of buffers (routers' biases).
WEIGHTS = (f"{MASTER}/", "frozen/", "buffer/")


class _Part(io.RawIOBase):
    """A byte range of a file, as a file. (DCP's own view of a part seeks beyond its end when asked for its end.)"""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        self._file = file
        self._offset = offset
        self._num_bytes = num_bytes
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._offset + self._position)
        contents = self._file.read(min(len(buffer), max(0, self._num_bytes - self._position)))
        buffer[: len(contents)] = contents
        self._position += len(contents)
        return len(contents)


def find_elements(file: IO[bytes], offset: int, num_bytes: int, dtype: str, elements: int, where: str) -> int:
    """Return the position in `file` of a stored tensor's numbers: `elements` consecutive ones of DTYPES[dtype].

    The archive has `num_bytes` from `offset`. Raises CheckpointError for anything but an archive of one flat tensor of
    that type and size, uncompressed, as torch.save writes it.
    """
    try:
        with zipfile.ZipFile(_Part(file, offset, num_bytes)) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CheckpointError(f"{where} holds a compressed tensor, which no save writes.")
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            numbers, pickled = members["data/0"], members["data.pkl"]
            is_flat = pickled.file_size <= _MAX_PICKLE_BYTES and archive.read(members["byteorder"]) == b"little"
            is_flat = is_flat and _list_opcodes(archive.read(pickled)) == _flat_tensor_opcodes(dtype, elements)
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{where} holds no tensor as torch.save writes it: {error}.") from None
    header = offset + numbers.header_offset
    stored_bytes = elements * DTYPES[dtype].itemsize
    if is_flat and numbers.file_size == stored_bytes and offset <= header <= offset + num_bytes - _ZIP_HEADER.size:
        file.seek(header)
        begin = header + _ZIP_HEADER.size + sum(_ZIP_HEADER.unpack(file.read(_ZIP_HEADER.size)))
        if begin + stored_bytes <= offset + num_bytes:
            return begin
    raise CheckpointError(f"{where} does not hold a flat tensor of {elements:,} {dtype} numbers.")


def _list_opcodes(contents: bytes) -> list[object]:
    """Return a pickle's opcodes, each as its argument or, without one, its name; memo opcodes are left out."""
    return [
        opcode.name if argument is None else argument
        for opcode, argument, _ in pickletools.genops(contents)
        if opcode.name not in ("BINPUT", "LONG_BINPUT")
    ]


def _flat_tensor_opcodes(dtype: str, elements: int) -> list[object]:
    """Return the opcodes of a tensor [elements] that covers a storage of the same size."""
    storage = ["MARK", "storage", f"torch {_STORAGES[dtype]}", "0", "cpu", elements, "TUPLE", "BINPERSID"]
    sizes = [0, elements, "TUPLE1", 1, "TUPLE1"]
    hooks = ["NEWFALSE", "collections OrderedDict", "EMPTY_TUPLE", "REDUCE"]
    return [2, "torch._utils _rebuild_tensor_v2", "MARK", *storage, *sizes, *hooks, "TUPLE", "REDUCE", "STOP"]


@dataclass
class HashedPlace(_StorageInfo):
    """The place of a chunk, with the hash of its bytes in the file."""

    xxh3_128: str = ""


class JsonIndexWriter(FileSystemWriter):
    """Writes tensors as DCP does (`__RANK_0.distcp`, one torch.save a chunk) and the index as `tensors.json`.

    The index maps a tensor's name to its dtype, its flattened size and its chunks
    [start, elements, file, byte offset, bytes, hash of these bytes].
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        hashed: Future[list[WriteResult]] = Future()
        hashed.set_result([self._with_hash(result) for result in written.value()])
        return hashed

    def _with_hash(self, result: WriteResult) -> WriteResult:
        place = result.storage_data
        with open(Path(self.path) / place.relative_path, "rb") as file:
            file.seek(place.offset)
            xxh3_128 = xxhash.xxh3_128(file.read(place.length)).hexdigest()
        return replace(
            result, storage_data=HashedPlace(place.relative_path, place.offset, place.length, None, xxh3_128)
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for written in results for result in written}
        index = {
            fqn: {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "size": entry.size.numel(),
                "chunks": [
                    [chunk.offsets[0], chunk.sizes[0], place.relative_path, place.offset, place.length, place.xxh3_128]
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


def load_index(folder: Path) -> dict[str, dict]:
    """Load the index: the checkpoint's tensors by name, each covered by its chunks exactly once.

    Memory is allocated by its sizes, so they are compared with the files: every element has its bytes there, and no
    byte is used twice. A file of another disk or of a store is compared when it is fetched. Raises CheckpointError when
    the index is missing, malformed or inconsistent.
    """
    path = folder / INDEX_NAME
    fetch_file(folder, INDEX_NAME)
    index = load_if_there(path, max_bytes=_MAX_INDEX_BYTES)
    if index is None:
        raise CheckpointError(f"{path} cannot be read: it is missing.")
    extents: dict[str, list[tuple[int, int]]] = {}
    for name, entry in index.items():
        for file, offset, length in _chunk_places(entry, f"{path}, tensor {name[:200]!r},"):
            extents.setdefault(file, []).append((offset, length))
    pieces = load_pieces(folder)
    if pieces:
        elsewhere = {file.name: file.num_bytes for file in load_manifest(folder).files}
    else:
        elsewhere = {}
    for file, places in extents.items():
        is_here = pieces is None or file in pieces.files
        _check_extents(folder / file, sorted(places), None if is_here else elsewhere.get(file, 0))
    return cast(dict[str, dict], index)


def fetch_checkpoint(folder: Path) -> str | None:
    """Fetch and verify every tensor of a checkpoint that this disk lacks; return what is damaged, or None."""
    try:
        fetch_chunks(folder, (chunk for entry in load_index(folder).values() for chunk in stored_chunks(entry)))
    except LlmscaleError as error:
        return str(error)
    return None


def stored_chunks(entry: Mapping, start: int = 0, elements: int | None = None) -> Iterator[Chunk]:
    """Yield the chunks that hold a range of an entry of the index."""
    end = entry["size"] if elements is None else start + elements
    for begin, count, file, offset, length, *rest in entry["chunks"]:
        if begin < end and begin + count > start:
            yield Chunk(file, offset, length, *(rest or [""]))


def _chunk_places(entry: object, where: str) -> list[tuple[str, int, int]]:
    """Return file, offset and length in bytes of a tensor's chunks. Raises CheckpointError unless they cover it."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "size", "chunks"} or str(entry["dtype"]) not in DTYPES:
        raise CheckpointError(f"{where} has no size, no chunks or no dtype of {', '.join(DTYPES)}.")
    itemsize = DTYPES[str(entry["dtype"])].itemsize
    chunks = []
    for chunk in entry["chunks"] if isinstance(entry["chunks"], list) else [entry["chunks"]]:
        match chunk:
            case [int(start), int(elements), str(file), int(offset), int(length), *rest] if rest == [] or (
                len(rest) == 1 and isinstance(rest[0], str)
            ):
                check_stored_name(file, where)
                if elements > 0 and offset >= 0 and length >= elements * itemsize:
                    chunks.append((start, elements, file, offset, length))
                    continue
        raise CheckpointError(f"{where} has the malformed chunk {str(chunk)[:100]}.")
    end = 0
    for start, elements, *_ in sorted(chunks):
        if start != end:
            raise CheckpointError(f"{where} has a chunk at element {start} where one at {end} should follow.")
        end += elements
    if type(entry["size"]) is not int or end != entry["size"]:
        raise CheckpointError(f"{where} has {end} elements in its chunks instead of {str(entry['size'])[:40]}.")
    return [(file, offset, length) for _, _, file, offset, length in chunks]


def _check_extents(file: Path, places: list[tuple[int, int]], num_bytes: int | None) -> None:
    """Raise CheckpointError for chunks that exceed the file or overlap. `num_bytes` is the size of a file elsewhere."""
    with unreadable_as(CheckpointError, file):
        if num_bytes is None:
            num_bytes = check_regular(file, follow_links=False).st_size
    ends = [0, *(offset + length for offset, length in places)]
    if ends[-1] > num_bytes or any(offset < end for (offset, _), end in zip(places, ends, strict=False)):
        raise CheckpointError(f"{file.parent / INDEX_NAME} places tensors beyond the end of {file.name} or twice.")


if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Fragment(ShardView):
    """The part of a flattened tensor that one rank holds, in the form that DCP needs.

    Every stage and world size cuts the same flat tensor at other places. `local` is a live view when loading and a copy
    on the host when saving.
    """

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        if not self.local.numel():
            return []
        chunk = ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=torch.Size([self.local.numel()]))
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self.local),
            size=torch.Size([self.total]),
        )
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def at(self, start: int) -> Tensor:
        """Return the elements of the write item that begins at element `start`: here there is one."""
        return self.local


def engine_fragments(engine: DeepSpeedEngine, *, with_frozen: bool = True) -> dict[str, Fragment]:
    """Return all tensors that this rank owns, by '<state>/<name>'; see zero_shards.state_views."""
    views = state_views(engine, with_frozen=with_frozen)
    return {key: Fragment(view.local, view.start, view.total) for key, view in views.items()}


class FragmentSavePlanner(DefaultSavePlanner):
    """Writes fragments; one rank writes those that several ranks hold."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        fragment: Fragment = self.state_dict[index.fqn]
        return fragment.at(index.offset[0] if index.offset else 0)


#: Index of a checkpoint: each tensor's dtype, size and chunks by its key, '<state>/<name>'.
Index = Mapping[str, Mapping]


def check_sizes(index: Index, fragments: Mapping[str, ShardView]) -> None:
    """Raise CheckpointError for a fragment of a tensor that is not stored, or has another size there."""
    for key, fragment in fragments.items():
        if key not in index:
            raise CheckpointError(f"the checkpoint has no '{key}': it belongs to another model or optimizer.")
        if index[key]["size"] != fragment.total:
            raise CheckpointError(
                f"'{key}' has {index[key]['size']} elements in the checkpoint and {fragment.total} in the model. The "
                "model's shape or vocabulary differs from the checkpoint's."
            )


def fill_fragments(folder: Path, index: Index, fragments: Mapping[str, ShardView]) -> None:
    """Fill fragments in place from the stored chunks, converted to their types. Raises CheckpointError.

    Takes the memory of one chunk at a time.
    """
    check_sizes(index, fragments)
    for key, fragment in fragments.items():
        _fill(folder, key, index[key], fragment.local, fragment.start)


def _fill(folder: Path, key: str, entry: Mapping, target: Tensor, start: int) -> None:
    """Fill `target` [n] with a stored tensor's elements from `start` on. Raises CheckpointError.

    A file may be gone, for example because the run continues and has deleted the checkpoint.
    """
    dtype = DTYPES[entry["dtype"]]
    end = start + target.numel()
    remedy = "A run that continues deletes checkpoints that it does not keep; name a newer one."
    for begin, elements, file_name, offset, num_bytes, *_ in entry["chunks"]:
        first = max(start, begin)
        last = min(end, begin + elements)
        if first >= last:
            continue
        part = target.detach()[first - start : last - start]
        if part.dtype == dtype and part.is_cpu:
            numbers = part
        else:
            numbers = torch.empty(last - first, dtype=dtype)
        path = folder / file_name
        with unreadable_as(CheckpointError, path, remedy), open_regular(path, follow_links=False) as file:
            place = find_elements(file, offset, num_bytes, entry["dtype"], elements, f"{path}, '{key[:200]}',")
            file.seek(place + (first - begin) * dtype.itemsize)
            if file.readinto(numbers.view(torch.uint8).numpy().data) != numbers.nbytes:
                raise CheckpointError(f"{path} ends within '{key[:200]}'.")
        if numbers is not part:
            part.copy_(numbers)


class StoredWeights:
    """The master weights, frozen parameters and buffers of a checkpoint, each as one flat tensor by its name."""

    def __init__(self, folder: Path, *, with_integers: bool = False) -> None:
        """Read the index only; of a remote run, fetch the weights. Raises CheckpointError when the index is damaged,
        or has weights of an integer type without `with_integers`."""
        self._folder = folder
        weights = {key: entry for key, entry in load_index(folder).items() if key.startswith(WEIGHTS)}
        for key, entry in weights.items():
            if not with_integers and not DTYPES[entry["dtype"]].is_floating_point:
                raise CheckpointError(f"{folder / INDEX_NAME}: the weights '{key[:200]}' are {entry['dtype']}.")
        self._entries = {key.partition("/")[2]: entry for key, entry in weights.items()}
        fetch_chunks(folder, (chunk for entry in self._entries.values() for chunk in stored_chunks(entry)))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of elements by parameter."""
        return {name: entry["size"] for name, entry in self._entries.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which a parameter is stored."""
        return cast("torch.dtype", DTYPES[self._entries[name]["dtype"]])

    def read(self, name: str, start: int, elements: int, *, own_type: bool = False) -> Tensor:
        """Read `elements` weights of a parameter from its element `start`, flat, in fp32 or, `own_type`, as stored.

        Raises CheckpointError.
        """
        weights = torch.empty(elements, dtype=self.dtype_of(name) if own_type else torch.float32)
        _fill(self._folder, name, self._entries[name], weights, start)
        return weights
