"""A checkpoint as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

Nothing but the tensor that is being written is in memory, and of most only a part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llmscale.architecture.families.family import Family, HFTensor
from llmscale.architecture.families.registry import FAMILIES, family_of
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_folder import CARD_NAME, CONFIG_NAME, GENERATION_NAME, check_space
from llmscale.checkpoint.published_record import POSITIONS, PublishedRecord, token_ids
from llmscale.checkpoint.safetensors_files import (
    TORCH_DTYPES,
    ExportDtype,
    plan_files,
    tensor_bytes,
    write_file,
    write_index,
)
from llmscale.checkpoint.stored_weights import StoredWeights
from llmscale.data.prepare.atomic_folder import new_folder
from llmscale.data.tokenizers.save_for_transformers import save_for_transformers
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import CheckpointError, ConfigError

#: The release whose configuration files these are, unless a published model's are kept.
_VERSION = {"transformers_version": "4.57.6"}
#: Weights in memory at a time, where a tensor can be written in the order in which it lies in the checkpoint.
_PART_ELEMENTS = 1 << 22
_TORCH_NAMES: dict[ExportDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ExportedModel:
    """A model as transformers will see it."""

    shape: GPTShape
    family: Family
    dtype: ExportDtype
    shard_bytes: int
    """No file of weights is larger, unless one tensor is."""
    record: PublishedRecord | None = None
    """The published model that it was made from."""
    last_positions: Tensor | None = None
    """Rows of the position table after those of the checkpoint, [rows, n_embd]."""

    @cached_property
    def tensors(self) -> tuple[HFTensor, ...]:
        return tuple(self.family.tensors(self.shape))

    @property
    def num_parameters(self) -> int:
        """Without the padding rows of the token table."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor_bytes(tensor, self.dtype) for tensor in self.tensors)


def describe_export(
    trained: GPTShape,
    record: PublishedRecord | None,
    dtype: ExportDtype,
    shard_bytes: int,
    *,
    model_type: str | None = None,
    seq_len: int | None = None,
) -> ExportedModel:
    """Return a model as transformers shall see it: in the family and with the context length of the published model
    that it was made from, else as its shape is, unless `model_type` or `seq_len` say otherwise. Raises ConfigError."""
    if model_type is not None:
        family = FAMILIES[model_type]
        if lost := family.lost(trained):
            raise ConfigError(f"--model-type {model_type} does not have {', '.join(lost)}. Leave the flag out.")
    else:
        family = record.family if record is not None and record.family.expresses(trained) else family_of(trained)
    rows = None if record is None or trained.positions != "learned" else record.last_positions(trained.seq_len)
    most = trained.seq_len + len(rows) if rows is not None else trained.seq_len
    if trained.positions == "rotary":
        most = max(most, record.shape.seq_len if record is not None else 0)
    elif seq_len is not None and not trained.seq_len <= seq_len <= most:
        raise ConfigError(
            f"--seq-len {seq_len} does not fit the model's learned positions. Legal: {trained.seq_len} to {most}."
        )
    shape = replace(trained, seq_len=seq_len or most)
    rows = rows[: shape.seq_len - trained.seq_len] if rows is not None else None
    return ExportedModel(shape, family, dtype, shard_bytes, record, rows)


class _WithPositions:
    """Weights with further rows of the position table."""

    def __init__(self, weights: Weights, rows: Tensor, first: int) -> None:
        """`rows`: [rows, n_embd], which follow the `first` elements of the weights' own table."""
        self._weights, self._rows, self._first = weights, rows.reshape(-1), first

    def read(self, name: str, start: int, elements: int) -> Tensor:
        """Return `elements` of a parameter from its element `start` on, in fp32."""
        own = min(elements, max(0, self._first - start)) if name == POSITIONS else elements
        parts = [self._weights.read(name, start, own)] if own else []
        if own < elements:
            begin = start + own - self._first
            parts.append(self._rows[begin : begin + elements - own])
        return torch.cat(parts)


class Weights(Protocol):
    """A model's parameters by name, flat."""

    def read(self, name: str, start: int, elements: int) -> Tensor:
        """`elements` of a parameter from its element `start` on, in fp32."""


def export_model(
    checkpoint: Path,
    model: ExportedModel,
    tokenizer: Tokenizer,
    out: Path,
    *,
    card: str,
    overwrite: bool,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Write the model of a checkpoint to `out`, as `write_model` does. Raises CheckpointError for tensors of another
    model."""
    stored = StoredWeights(checkpoint)
    more = 0 if model.last_positions is None else len(model.last_positions)
    _check_same_model(stored, replace(model.shape, seq_len=model.shape.seq_len - more), checkpoint)
    write_model(stored, model, tokenizer, out, card=card, overwrite=overwrite, progress=progress)


def write_model(
    weights: Weights,
    model: ExportedModel,
    tokenizer: Tokenizer,
    out: Path,
    *,
    card: str,
    overwrite: bool,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Write configurations, weights, tokenizer and the model card `card` to `out`, all of it or nothing.

    `overwrite` replaces the folder, which was checked (checkpoint/hf_folder.py). Every file of weights is read back and
    compared. Raises ConfigError for weights that `dtype` cannot hold, DataError when `out` cannot be written,
    MachineError when the disk returns something else than was written.
    """
    if model.last_positions is not None:
        first = model.shape.seq_len * model.shape.n_embd - model.last_positions.numel()
        weights = _WithPositions(weights, model.last_positions, first)
    files = plan_files(model.tensors, model.dtype, model.shard_bytes)
    check_space(out, model.weight_bytes)
    with new_folder(out, replace=overwrite) as folder:
        read = partial(_parts, weights, model.dtype)
        for name, tensors in files.items():
            write_file(folder / name, tensors, model.dtype, read, progress)
        if len(files) > 1:
            write_index(folder, files, model.dtype)
        save_for_transformers(tokenizer, folder)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        ids, generation_ids = token_ids(model.record, tokenizer)
        given = (model.record.generation if model.record is not None else None) or {}
        _write_json(folder / GENERATION_NAME, {**_VERSION, **given, **generation_ids})
        # The last: a folder without it is no model.
        _write_json(folder / CONFIG_NAME, {**_config(model), **ids})


def _config(model: ExportedModel) -> dict[str, object]:
    """Return config.json without the special tokens: the entries of the published model, where there was one."""
    kept = model.record.describe(model.shape, model.family) if model.record is not None else {}
    dtype = "dtype" if "dtype" in kept else "torch_dtype"
    kept.pop("torch_dtype", None)
    return {
        **_VERSION,
        **(kept or model.family.write(model.shape)),
        "model_type": model.family.model_type,
        "architectures": [model.family.architecture],
        dtype: _TORCH_NAMES[model.dtype],
    }


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _check_same_model(stored: StoredWeights, shape: GPTShape, checkpoint: Path) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the shape's parameters."""
    own = {tensor.name: tensor.elements for tensor in shape.tensors.all}
    sizes = stored.sizes
    for name in sorted(own.keys() ^ sizes.keys()):
        what = "lacks" if name in own else "holds"
        raise CheckpointError(
            f"{checkpoint} {what} '{name[:200]}': its tensors and its configuration are of different models."
        )
    for name, elements in own.items():
        if sizes[name] != elements:
            raise CheckpointError(
                f"{checkpoint}: '{name}' has {sizes[name]:,} elements, and {elements:,} by the configuration beside it."
            )


def _parts(stored: Weights, dtype: ExportDtype, tensor: HFTensor) -> Iterator[Tensor]:
    """A tensor of theirs in consecutive flat parts in `dtype`."""
    rows, columns = _as_matrix(tensor)
    zeros = (tensor.skipped_rows if tensor.parameter else rows) * columns
    for done in range(0, zeros, _PART_ELEMENTS):
        yield torch.zeros(min(_PART_ELEMENTS, zeros - done), dtype=TORCH_DTYPES[dtype])
    if tensor.transposed:
        yield _transposed(stored, dtype, tensor)
        return
    first, count = tensor.first_row * columns, rows * columns - zeros
    for done in range(0, count, _PART_ELEMENTS):
        part = stored.read(tensor.parameter, first + done, min(_PART_ELEMENTS, count - done))
        yield _converted(part, dtype, tensor.name)


def _as_matrix(tensor: HFTensor) -> tuple[int, int]:
    """Rows and elements of a row."""
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _transposed(stored: Weights, dtype: ExportDtype, tensor: HFTensor) -> Tensor:
    """Flat and whole, filled with some of our rows, [rows, columns], at a time."""
    columns, rows = _as_matrix(tensor)
    theirs = torch.empty(columns, rows, dtype=TORCH_DTYPES[dtype])
    at_once = max(1, _PART_ELEMENTS // columns)
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        ours = stored.read(tensor.parameter, (tensor.first_row + row) * columns, count * columns)
        theirs[:, row : row + count] = _converted(ours, dtype, tensor.name).view(count, columns).t()
    return theirs.view(-1)


def _converted(weights: Tensor, dtype: ExportDtype, name: str) -> Tensor:
    if not weights.isfinite().all():
        raise ConfigError(
            f"'{name}' holds NaN or infinity: training diverged before this checkpoint. Name another one."
        )
    converted = weights.to(TORCH_DTYPES[dtype])
    if not converted.isfinite().all():
        largest = weights.abs().max().item()
        legal = "fp32 or bf16" if dtype == "fp16" else "fp32"
        raise ConfigError(f"{dtype} cannot hold the {largest:g} in '{name}'. Legal here: --dtype {legal}.")
    return converted
