"""The weights of a loop's own checkpoint without an engine: as tensors, and as safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llmscale.checkpoint.engine_state import EngineState, read_engine_state
from llmscale.checkpoint.inventory import open_checkpoint
from llmscale.checkpoint.portable import ReadableWeights
from llmscale.checkpoint.tensor_files import StoredWeights
from llmscale.errors import CheckpointError, ConfigError, write_failure
from llmscale.files.atomic_write import write_durably

INDEX_NAME = "model.safetensors.index.json"
#: Size of a file above which the next tensor begins another one, as transformers has it.
SHARD_BYTES = 5 * 10**9
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_weights(folder: str | Path, step: int | None = None) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by the module's own names, as `load_state_dict` takes them.

    `folder` is that of the checkpoints, whose newest one is read or that of `step`, or one checkpoint. Trained weights
    are the optimizer's fp32 ones; tied names share a tensor. Needs neither an engine nor ranks. Raises CheckpointError.
    """
    state, stored = _open(Path(folder), step)
    weights = {name: _read(stored, name, shape) for name, shape in _stored_shapes(state, stored).items()}
    return weights | {alias: weights[name] for alias, name in state.tied.items() if name in weights}


def export_weights(
    folder: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the weights of a checkpoint to the folder `out` as safetensors files of at most `shard_bytes`, and return
    their paths.

    Names are the module's own; tied ones are written once. Floating-point weights are converted to `dtype`, if given.
    Several files have an index, as transformers reads it. Takes the memory of one file. Raises CheckpointError,
    ConfigError for a folder that holds something, DataError if it cannot be written.
    """
    if dtype is not None and dtype not in _TYPES:
        raise ConfigError(f"dtype = {dtype!r}: must be {', '.join(_TYPES)}, or None to keep each weight's own.")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes = {shard_bytes}: must be at least 1.")
    state, stored = _open(Path(folder), step)
    return write_weights(Path(out), state, stored, dtype, shard_bytes)


def write_weights(
    place: Path,
    state: EngineState,
    stored: StoredWeights | ReadableWeights,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write stored weights to a folder. Raises as export_weights."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise ConfigError(f"{place} holds something already. Name an empty folder.")
        return _write(place, state, stored, _TYPES[dtype] if dtype else None, shard_bytes)
    except OSError as error:
        raise write_failure(error, place) from None


def _write(
    place: Path,
    state: EngineState,
    stored: StoredWeights | ReadableWeights,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> list[Path]:
    from safetensors.torch import save_file

    shapes = _stored_shapes(state, stored)
    plan = list(_plan_files(stored, shapes, dtype, shard_bytes))
    paths = []
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(plan, start=1):
        path = place / "model.safetensors"
        if len(plan) > 1:
            path = place / f"model-{number:05}-of-{len(plan):05}.safetensors"
        tensors = {name: _convert(_read(stored, name, shapes[name]), dtype) for name in names}
        save_file(tensors, path, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(names, path.name)
        paths.append(path)
    if len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_durably(place / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return paths


def _open(folder: Path, step: int | None) -> tuple[EngineState, StoredWeights]:
    """Open a checkpoint, every byte of it verified."""
    source = open_checkpoint(folder, step=step)
    if damage := source.find_damage():
        raise CheckpointError(damage)
    return read_engine_state(source), StoredWeights(source.path, with_integers=True)


def _stored_shapes(state: EngineState, stored: StoredWeights | ReadableWeights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint holds: frozen ones may have been left out."""
    sizes = stored.sizes
    return {name: shape for name, shape in state.shapes.items() if state.has_frozen or name in sizes}


def _read(stored: StoredWeights | ReadableWeights, name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in stored.sizes or torch.Size(shape).numel() != stored.sizes[name]:
        raise CheckpointError(f"the checkpoint has not the {torch.Size(shape).numel()} elements of '{name}' {shape}.")
    return stored.read(name, 0, stored.sizes[name], own_type=True).view(shape)


def _convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor


def _plan_files(
    stored: StoredWeights | ReadableWeights,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> Iterator[list[str]]:
    """Yield the names of each file: as many as fit, and at least one."""
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        own = stored.dtype_of(name)
        if dtype is not None and own.is_floating_point:
            own = dtype
        num_bytes = torch.Size(shape).numel() * own.itemsize
        if names and filled + num_bytes > shard_bytes:
            yield names
            names = []
            filled = 0
        names.append(name)
        filled += num_bytes
    yield names
