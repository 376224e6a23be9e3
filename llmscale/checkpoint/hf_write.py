"""Write a Hugging Face model: checks of the folder, safetensors files, the published model that a run started from.

A safetensors file is 8 bytes (the header's length, little-endian), a JSON header with each tensor's type, shape and
range, and the tensors' bytes (https://huggingface.co/docs/safetensors). Tensors are written part by part, so that none
is complete in memory. The same tensors give the same bytes. Imports torch only to write tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash

from llmscale.architecture.families.family import HFTensor
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.config.hf_model import PREFIX, PublishedModel, read_published_model
from llmscale.config.run_config import RunConfig
from llmscale.config.user_paths import check_output_folder
from llmscale.data.prepare.output_folder import find_writer
from llmscale.data.shards.verify_shards import hash_file
from llmscale.errors import CheckpointError, ConfigError, DataError, MachineError
from llmscale.untrusted.paths import read_regular

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
CARD_NAME = "README.md"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: Names of peft's files.
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
#: Names that `llmscale export` writes, tokenizers' files included, and the only ones that --overwrite deletes.
_FILE_NAMES = (
    CONFIG_NAME,
    GENERATION_NAME,
    CARD_NAME,
    WEIGHTS_NAME,
    INDEX_NAME,
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
#: Line in every exported model card.
CARD_MARK = "- llmscale"
_CARD_BYTES = 1 << 20
_SHARD_NAME = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
#: Space that an export needs beside the weights: a large vocabulary's tokenizer.json, and the file system's overhead.
_SPARE_BYTES = 32 * 2**20
ExportDtype = Literal["fp32", "bf16", "fp16"]
#: safetensors' name of each type, and its bytes per element.
_STORED_TYPES: dict[ExportDtype, tuple[str, int]] = {"fp32": ("F32", 4), "bf16": ("BF16", 2), "fp16": ("F16", 2)}
#: Tensors begin at a multiple of this many bytes, as in files of safetensors itself.
_ALIGNMENT = 8
#: Folder of a run that holds the description of the published model it started from.
PUBLISHED_NAME = "published"
#: File with the published position table's rows after the run's own, and the parameter that they belong to.
POSITIONS_NAME = "positions.safetensors"
POSITIONS = "wpe.weight"


def shard_name(number: int, total: int) -> str:
    """Return the name of one of several files of weights, numbered from 1."""
    return f"model-{number:05}-of-{total:05}.safetensors"


def check_hf_folder(out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    """Raise ConfigError for an output folder that must not be written."""
    check_output_folder("--to", out)
    if out.is_symlink():
        raise ConfigError(f"--to {out} is a link. Name a folder.")
    try:
        place = out.resolve()
        if out.is_dir():
            names = sorted(path.name for path in out.iterdir())
        else:
            names = []
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other, before Python 3.13
        raise ConfigError(f"--to {out} cannot be read: {error}. Name another folder.") from None
    checkpoint = checkpoint.resolve()
    if checkpoint.parent.name == CHECKPOINTS_NAME:
        guarded = checkpoint.parent
    else:
        guarded = checkpoint
    if place.is_relative_to(guarded):
        raise ConfigError(f"--to {out} is inside {guarded}, where only training writes. Name a folder outside it.")
    if Path.cwd().is_relative_to(place):
        raise ConfigError(f"--to {out} is the folder that this runs in, and cannot be replaced. Name another one.")
    writer = find_writer(out)
    if writer is not None:
        raise ConfigError(
            f"--to {out} is being written: another process is at {writer}. Wait for it to end, or name another folder."
        )
    # Every export has a configuration: a README.md alone is somebody's project.
    ours = {name for name in names if name in _FILE_NAMES or _SHARD_NAME.fullmatch(name)}
    has_config = CONFIG_NAME in names or ADAPTER_CONFIG_NAME in names
    foreign = [name for name in names if name not in ours or not has_config]
    if foreign:
        raise ConfigError(
            f"--to {out} holds '{foreign[0]}', which no export wrote, so it will not be replaced. Name another folder."
        )
    if names and not _is_marked(out / CARD_NAME):
        raise ConfigError(
            f"--to {out} holds a model that no export wrote ({CARD_NAME} does not say llmscale), so it will not be "
            "replaced. Name another folder."
        )
    if names and not overwrite:
        raise ConfigError(f"--to {out} exists already. Name another folder, or replace it with --overwrite.")


def _is_marked(card: Path) -> bool:
    """Return whether a model card has the tag of an export."""
    if not card.is_file() or card.stat().st_size > _CARD_BYTES:
        return False
    return CARD_MARK in read_regular(card, _CARD_BYTES).decode(errors="replace").splitlines()


def check_space(out: Path, weight_bytes: int) -> None:
    """Raise DataError when the disk has no room for `weight_bytes` of weights."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    needed = weight_bytes + _SPARE_BYTES
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DataError(
            f"Cannot write {out}: {needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free. Free some "
            "space, name a folder on another disk, or a smaller --dtype."
        )


def plan_files(tensors: Sequence[HFTensor], dtype: ExportDtype, shard_bytes: int) -> dict[str, list[HFTensor]]:
    """Distribute tensors over files in order: as many as fit into `shard_bytes`, and at least one."""
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
    """Return the bytes of one tensor in a file of `dtype`."""
    return math.prod(tensor.shape) * _STORED_TYPES[dtype_of(tensor, dtype)][1]


def dtype_of(tensor: HFTensor, dtype: ExportDtype) -> ExportDtype:
    """Return the type of a tensor in a file of `dtype`."""
    return "fp32" if tensor.is_fp32 else dtype


def write_index(folder: Path, files: dict[str, list[HFTensor]], dtype: ExportDtype) -> None:
    """Write the index of several files, as transformers requires it. Raises OSError."""
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
    """Write `tensors` durably, read them back from the disk and compare.

    `read` yields consecutive parts of one tensor, flat and in its `dtype_of`; `progress` gets numbers of written bytes.
    Raises OSError, and MachineError when the disk returns other bytes than were written.
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
        # Otherwise the page cache is read back and not the disk.
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if hash_file(path, "xxh3_128") != digest.hexdigest():
        raise MachineError(f"{path} was read back with another content than was written. Try again.")


def _contents(
    tensors: Sequence[HFTensor], dtype: ExportDtype, read: Callable[[HFTensor], Iterable[Tensor]]
) -> Iterator[memoryview]:
    """Yield the bytes of a file in parts."""
    import torch

    yield memoryview(_header(tensors, dtype))
    for tensor in tensors:
        for part in read(tensor):
            yield part.contiguous().view(torch.uint8).numpy().data


def _header(tensors: Sequence[HFTensor], dtype: ExportDtype) -> bytes:
    # transformers refuses a file without the name of the library whose tensors it holds.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin = end
        end = end + tensor_bytes(tensor, dtype)
        header[tensor.name] = {
            "dtype": _STORED_TYPES[dtype_of(tensor, dtype)][0],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def open_published(run: Path, config: RunConfig) -> PublishedModel | None:
    """Return the published model whose description a run folder keeps, or None. Raises ConfigError."""
    folder = run / PUBLISHED_NAME
    # A link could make an export, or another run, contain any file of this machine: the run folder is not trusted.
    for path in (folder, *(folder / name for name in (CONFIG_NAME, GENERATION_NAME, POSITIONS_NAME))):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link. Put what it leads to in its place.")
    if (folder / CONFIG_NAME).is_file():
        return read_published_model("the run's", f"{PREFIX}{folder}", config)
    return None


def last_positions(model: PublishedModel, first: int) -> Tensor | None:
    """Return the published positions from row `first`, [rows, n_embd]; None when the run kept none.

    Raises CheckpointError.
    """
    path = (model.folder or Path()) / POSITIONS_NAME
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        rows = load_file(path)[POSITIONS].float()
    except (SafetensorError, OSError, KeyError):
        rows = None
    if rows is None or rows.shape != (model.shape.seq_len - first, model.shape.n_embd):
        raise CheckpointError(f"{path} is damaged: it does not hold the model's positions after the first {first:,}.")
    return rows
