"""Weights of a run with adapters: its base's from where they are, alone or merged, and its adapters for peft."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llmscale.architecture.families.family import Family, HFTensor
from llmscale.architecture.layers import ADAPTERS
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import TensorSlice, fill_view, find_weights_files, list_tensors, match_tensors
from llmscale.checkpoint.hf_write import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    CARD_NAME,
    check_space,
    tensor_bytes,
    write_file,
)
from llmscale.checkpoint.initial_weights import check_base, checksum_of, explain_missing, open_base
from llmscale.checkpoint.peft_files import describe_adapters, peft_tensors
from llmscale.checkpoint.run_state import SavedRun
from llmscale.checkpoint.tensor_files import StoredWeights
from llmscale.config.hf_model import read_published_model
from llmscale.data.prepare.output_folder import new_folder
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError, ConfigError, LlmscaleError


class Weights(Protocol):
    """Parameters of a model by name, flattened."""

    def read(self, name: str, start: int, elements: int) -> Tensor:
        """Return `elements` of a parameter from its element `start` on, in fp32."""


class _Published:
    """Weights of a published model."""

    def __init__(self, pieces: Mapping[str, tuple[TensorSlice, ...]]) -> None:
        self._pieces = pieces

    def read(self, name: str, start: int, elements: int) -> Tensor:
        local = torch.empty(elements)
        fill_view(ShardView(local, start, start + elements), self._pieces[name])
        return local


class Merged:
    """A base's weights, plus the products of adapters: W + (alpha / r) B A."""

    def __init__(self, base: Weights, adapters: Weights, shape: GPTShape) -> None:
        self._base, self._adapters, self._shape = base, adapters, shape
        self._sizes = {tensor.name: tensor.parameter.shape for tensor in shape.tensors.all}

    def read(self, name: str, start: int, elements: int) -> Tensor:
        weights = self._base.read(name, start, elements)
        place, _, kind = name.rpartition(".")
        if kind != "weight" or f"{place}.{ADAPTERS[0]}" not in self._sizes:
            return weights
        a, b = (
            self._adapters.read(own, 0, math.prod(self._sizes[own])).view(self._sizes[own])
            for own in (f"{place}.{adapter}" for adapter in ADAPTERS)
        )
        rank, columns = b.shape[1], a.shape[1]
        first, last = start // columns, -(-(start + elements) // columns)
        added, row = weights.new_zeros(last - first, columns), 0
        layer = ".".join(place.split(".")[2:])
        for number, rows in enumerate(self._shape.adapter_rows(layer)):
            begin, end = max(first, row), min(last, row + rows)
            if begin < end:
                added[begin - first : end - first] = b[begin:end] @ a[number * rank : (number + 1) * rank]
            row += rows
        scale = self._shape.lora_alpha / self._shape.lora_rank
        return weights + scale * added.view(-1)[start - first * columns :][:elements]


def open_base_weights(saved: SavedRun, place: str | None, progress: Callable[[int], object]) -> Weights:
    """Verify the weights beside a checkpoint's adapters, at `place` or where they were, and open them.

    `progress` gets the bytes verified since the last call. Raises CheckpointError.
    """
    place = place or saved.state.base["place"]
    try:
        base = open_base(place)
        if base.source is not None:
            if damage := base.source.find_damage(progress=progress):
                raise CheckpointError(damage)
            weights: Weights = StoredWeights(base.source.path)
            files: tuple[Path, ...] = ()
        else:
            published = read_published_model("--base", place)
            if published.folder is None:
                raise CheckpointError(f"{place} is not on this machine. Download it.")
            listed = find_weights_files(published.folder)
            tensors = list_tensors(listed)
            weights, files = _Published(match_tensors(tensors, published.tensors, published.source)), listed.files
    except LlmscaleError as error:
        raise explain_missing(place, saved.path, error, "--base") from None
    check_base(replace(base, checksum=checksum_of(base, files)), saved)
    return weights


def export_adapters(
    checkpoint: Path, shape: GPTShape, family: Family, base: str, out: Path, *, card: str, overwrite: bool
) -> int:
    """Write a checkpoint's adapters to `out` for peft, in fp32, all of it or nothing; return their bytes.

    Raises CheckpointError, DataError and MachineError as `write_model` does.
    """
    stored = StoredWeights(checkpoint)
    tensors = [tensor for pair in peft_tensors(shape, family) for tensor in pair]
    num_bytes = sum(tensor_bytes(tensor, "fp32") for tensor in tensors)
    check_space(out, num_bytes)

    def read(tensor: HFTensor) -> Iterator[Tensor]:
        part = stored.read(tensor.parameter, tensor.first_row * tensor.shape[1], math.prod(tensor.shape))
        if not part.isfinite().all():
            raise ConfigError(f"'{tensor.name}' holds NaN or infinity: training diverged. Name another checkpoint.")
        yield part

    with new_folder(out, replace=overwrite) as folder:
        write_file(folder / ADAPTER_WEIGHTS_NAME, tensors, "fp32", read, lambda written: None)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        config = describe_adapters(shape, family, base)
        # Last, because a folder without it cannot be loaded.
        (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return num_bytes
