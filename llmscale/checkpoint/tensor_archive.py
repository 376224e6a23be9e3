"""What a checkpoint's tensor may look like on disk: as `torch.save` writes it, and not as an archive that unfolds.

`torch.load(weights_only=True)` runs no code that a file brings along. But it unpacks compressed archives of any ratio,
and calls a few constructors with any size; so what it is given is looked at first, without unpacking anything.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from typing import IO

import torch

from llmscale.errors import CheckpointError

#: Of what a training state consists of, by torch's names.
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}
#: Bytes of an element, by the name under which the pickle in an archive refers to the kind of numbers.
_STORAGES = {
    "torch FloatStorage": 4,
    "torch BFloat16Storage": 2,
    "torch HalfStorage": 2,
    "torch DoubleStorage": 8,
    "torch LongStorage": 8,
    "torch IntStorage": 4,
    "torch ShortStorage": 2,
    "torch CharStorage": 1,
    "torch ByteStorage": 1,
    "torch BoolStorage": 1,
}
#: What else it refers to.
_REBUILD = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
#: torch writes 200 to 500 bytes.
_MAX_PICKLE_BYTES = 4096


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
    if len(storages) != 1 or largest * _STORAGES[storages[0]] > data_bytes:
        raise CheckpointError(f"{where} holds a tensor that claims more elements than are there.")
