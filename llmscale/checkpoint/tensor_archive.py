"""What a checkpoint's tensor may look like on disk: as `torch.save` writes it, and not as an archive that unfolds.

`torch.load(weights_only=True)` runs no code that a file brings along. But it unpacks compressed archives of any ratio,
and calls a few constructors with any size; so what it is given is looked at first, without unpacking anything.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
from typing import IO

import torch

from llmscale.errors import CheckpointError

#: Of what a training state consists of, by torch's names.
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}
#: Names in DTYPES, by the name under which the pickle in an archive refers to the kind of numbers.
_STORAGES = {
    "torch FloatStorage": "float32",
    "torch BFloat16Storage": "bfloat16",
    "torch HalfStorage": "float16",
    "torch DoubleStorage": "float64",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
#: What else it refers to.
_REBUILD = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
#: torch writes 200 to 500 bytes.
_MAX_PICKLE_BYTES = 4096
#: What precedes the name in a ZIP archive's header of a member, and where in it the lengths of what follows stand.
_ZIP_HEADER = struct.Struct("<26xHH")


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file. (DCP's own view of a part seeks beyond its end when asked for its end.)"""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes = file, offset, num_bytes
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


def check_archive(file: IO[bytes], offset: int, num_bytes: int, where: str) -> None:
    """Refuse what is no plain archive of one tensor in `num_bytes` of a file from `offset` on.

    Nothing in it may be compressed, so that it holds no more than its `num_bytes`. Its pickle may name nothing but what
    rebuilds a tensor, and no number beyond the elements that are there: torch takes it at its word, and reads behind
    the end. Raises CheckpointError.
    """
    try:
        with zipfile.ZipFile(_Part(file, offset, num_bytes)) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CheckpointError(f"{where} holds a compressed tensor, which no save writes.")
            if sum(member.file_size for member in archive.infolist()) > num_bytes:
                raise CheckpointError(f"{where} holds a tensor of more bytes than it has.")
            if members["data.pkl"].file_size > _MAX_PICKLE_BYTES:
                raise CheckpointError(f"{where} holds more than one tensor.")
            _check_pickle(archive.read(members["data.pkl"]), members["data/0"].file_size, where)
    except KeyError as error:
        raise CheckpointError(f"{where} holds no tensor as torch.save writes it: no {error}.") from None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{where} holds no tensor as torch.save writes it: {error}.") from None


def find_elements(file: IO[bytes], offset: int, num_bytes: int, dtype: str, elements: int, where: str) -> int:
    """Where in `file` the numbers of a stored tensor begin: `elements` of DTYPES[dtype], one after the other.

    The archive takes `num_bytes` from `offset` on. So a part of a tensor can be read without the rest, and nothing is
    unpickled. Raises CheckpointError for anything but a flat tensor of that kind and size as torch.save writes it.
    """
    check_archive(file, offset, num_bytes, where)
    try:
        with zipfile.ZipFile(_Part(file, offset, num_bytes)) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            said = _plain_pickle(archive.read(members["data.pkl"]))
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
        header = offset + members["data/0"].header_offset
        file.seek(header)
        name_bytes, extra_bytes = _ZIP_HEADER.unpack(file.read(_ZIP_HEADER.size))
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{where} holds no tensor as torch.save writes it: {error}.") from None
    storage = next(name for name, kind in _STORAGES.items() if kind == dtype)
    if said != _flat_pickle(storage, elements) or order != b"little":
        raise CheckpointError(f"{where} does not hold a flat tensor of {elements:,} {dtype} numbers, as is said of it.")
    begin = header + _ZIP_HEADER.size + name_bytes + extra_bytes
    stored_bytes = elements * DTYPES[dtype].itemsize
    if members["data/0"].file_size != stored_bytes or begin + stored_bytes > offset + num_bytes:
        raise CheckpointError(f"{where} has other bytes than the {elements:,} {dtype} numbers that it describes.")
    return begin


def _plain_pickle(contents: bytes) -> list[object]:
    """What a pickle says, opcode by opcode: the argument, or the name of one without; what only numbers the parts is
    left out."""
    return [
        opcode.name if argument is None else argument
        for opcode, argument, _ in pickletools.genops(contents)
        if opcode.name not in ("BINPUT", "LONG_BINPUT")
    ]


def _flat_pickle(storage: str, elements: int) -> list[object]:
    """The same of a tensor [elements] over a storage of as many, from its first element on."""
    return [
        *(2, "torch._utils _rebuild_tensor_v2", "MARK"),
        *("MARK", "storage", storage, "0", "cpu", elements, "TUPLE", "BINPERSID"),
        *(0, elements, "TUPLE1", 1, "TUPLE1", "NEWFALSE"),
        *("collections OrderedDict", "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"),
    ]


def _check_pickle(contents: bytes, data_bytes: int, where: str) -> None:
    """`contents` describes one tensor over `data_bytes` of numbers."""
    storages, largest = [], 0
    for opcode, argument, _ in pickletools.genops(contents):
        if opcode.name == "GLOBAL" and argument in _STORAGES:
            storages.append(argument)
        elif opcode.name in ("STACK_GLOBAL", "INST") or (opcode.name == "GLOBAL" and argument not in _REBUILD):
            raise CheckpointError(f"{where} holds a tensor that refers to {str(argument)[:80]!r}.")
        elif opcode.name in _INTEGERS:
            largest = max(largest, abs(int(argument or 0)))
    if len(storages) != 1 or largest * DTYPES[_STORAGES[storages[0]]].itemsize > data_bytes:
        raise CheckpointError(f"{where} holds a tensor that claims more elements than are there.")
