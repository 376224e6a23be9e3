"""safetensors files written as their tensors come, so that none of them is ever whole in memory.

A file is 8 bytes (the length of what follows, little-endian), a JSON object that says each tensor's kind, shape and
place, and the tensors' bytes one after the other (https://huggingface.co/docs/safetensors). The same tensors give the
same bytes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor

from llmscale.architecture.families.family import HFTensor
from llmscale.checkpoint.hf_folder import INDEX_NAME, WEIGHTS_NAME, shard_name
from llmscale.data.shards.verify_shards import hash_file
from llmscale.errors import MachineError

ExportDtype = Literal["fp32", "bf16", "fp16"]
TORCH_DTYPES: dict[ExportDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES: dict[ExportDtype, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
#: Tensors begin at a multiple of this many bytes, as where safetensors itself writes.
_ALIGNMENT = 8


def plan_files(tensors: Sequence[HFTensor], dtype: ExportDtype, shard_bytes: int) -> dict[str, list[HFTensor]]:
    """Which tensors each file holds, in their order: as many as fit into `shard_bytes`, and at least one."""
    groups: list[list[HFTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        num_bytes = tensor_bytes(tensor, dtype)
        if groups[-1] and filled + num_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += num_bytes
    if len(groups) == 1:
        return {WEIGHTS_NAME: groups[0]}
    return {shard_name(number, len(groups)): group for number, group in enumerate(groups, start=1)}


def tensor_bytes(tensor: HFTensor, dtype: ExportDtype) -> int:
    """Of one tensor in a file."""
    return math.prod(tensor.shape) * TORCH_DTYPES[dtype].itemsize


def write_index(folder: Path, files: dict[str, list[HFTensor]], dtype: ExportDtype) -> None:
    """Say which file holds which tensor, as transformers wants it where there are several. Raises OSError."""
    everything = [tensor for group in files.values() for tensor in group]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in everything),
            "total_size": sum(tensor_bytes(tensor, dtype) for tensor in everything),
        },
        "weight_map": {tensor.name: name for name, group in files.items() for tensor in group},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(
    path: Path,
    tensors: Sequence[HFTensor],
    dtype: ExportDtype,
    read: Callable[[HFTensor], Iterable[Tensor]],
    progress: Callable[[int], object],
) -> None:
    """Write `tensors`, read them back from the disk and compare. `read` gives the consecutive parts of one of them,
    flat and in `dtype`; `progress` is called with numbers of bytes that are done.

    Durable when this returns. Raises OSError, and MachineError when the disk returns something else than was written.
    """
    digest = xxhash.xxh3_128()
    with open(path, "xb", buffering=0) as file:
        for part in _contents(tensors, dtype, read):
            digest.update(part)
            rest = part
            while rest:
                rest = rest[file.write(rest) :]
            progress(len(part))
        os.fsync(file.fileno())
        # Else what is read back is the memory that the system keeps of it.
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if hash_file(path, "xxh3_128") != digest.hexdigest():
        raise MachineError(f"{path} was read back with another content than was written. Try again.")


def _contents(
    tensors: Sequence[HFTensor], dtype: ExportDtype, read: Callable[[HFTensor], Iterable[Tensor]]
) -> Iterator[memoryview]:
    """The bytes of a file, in parts."""
    yield memoryview(_header(tensors, dtype))
    for tensor in tensors:
        for part in read(tensor):
            yield part.contiguous().view(torch.uint8).numpy().data


def _header(tensors: Sequence[HFTensor], dtype: ExportDtype) -> bytes:
    # transformers refuses a file that does not say which library's tensors it holds.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor_bytes(tensor, dtype)
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
