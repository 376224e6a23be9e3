"""Weights to evaluate or to export: a checkpoint's, a published model's, adapters with their base, a merged model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llmscale.architecture.layers import ADAPTERS, is_adapter
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import WeightsFiles, fill_view, find_weights_files, list_tensors, match_tensors
from llmscale.checkpoint.initial_weights import check_base, checksum_of, explain_missing, open_base
from llmscale.checkpoint.run_state import SavedRun
from llmscale.checkpoint.tensor_files import StoredWeights
from llmscale.config.hf_model import PublishedModel, read_published_model
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError, LlmscaleError


class Weights(Protocol):
    """Parameters of a model by name, flattened."""

    def read(self, name: str, start: int, elements: int) -> Tensor:
        """Return `elements` of a parameter from its element `start` on, in fp32."""


class Published:
    """Weights of a published model. Raises CheckpointError for files that do not fit its config.json."""

    def __init__(self, model: PublishedModel, files: WeightsFiles) -> None:
        self._pieces = match_tensors(list_tensors(files), model.tensors, model.source, model.architecture)

    def read(self, name: str, start: int, elements: int) -> Tensor:
        local = torch.empty(elements)
        fill_view(ShardView(local, start, start + elements), self._pieces[name])
        return local


class _WithAdapters:
    """Weights of a checkpoint with adapters; its base has the others."""

    def __init__(self, base: Weights, stored: StoredWeights) -> None:
        self._base = base
        self._stored = stored
        self._own = frozenset(stored.sizes)

    def read(self, name: str, start: int, elements: int) -> Tensor:
        return (self._stored if name in self._own else self._base).read(name, start, elements)


def open_stored(folder: Path, shape: GPTShape, base: Weights | None) -> Weights:
    """Open the weights of a verified checkpoint, and of the base beside its adapters.

    Raises CheckpointError for tensors of another model.
    """
    stored = StoredWeights(folder)
    if base is None:
        frozen = []
    else:
        frozen = [tensor for tensor in shape.tensors.all if not is_adapter(tensor.name)]
    _check_same_model(stored.sizes | {tensor.name: tensor.elements for tensor in frozen}, shape, folder)
    if base is None:
        return stored
    return _WithAdapters(base, stored)


def _check_same_model(sizes: Mapping[str, int], shape: GPTShape, folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint's tensors, their elements by name, are exactly those of a shape."""
    own = {tensor.name: tensor.elements for tensor in shape.tensors.all}
    if shape.router_bias:  # a buffer
        sparse = filter(shape.is_sparse, range(shape.n_layer))
        own |= {f"blocks.{block}.mlp.router.bias": shape.num_experts for block in sparse}
    for name in sorted(own.keys() ^ sizes.keys()):
        what = "lacks" if name in own else "holds"
        raise CheckpointError(
            f"{folder} {what} '{name[:200]}': its tensors and its configuration are of different models."
        )
    for name, elements in own.items():
        if sizes[name] != elements:
            raise CheckpointError(
                f"{folder}: '{name}' has {sizes[name]:,} elements, and its configuration requires {elements:,}."
            )


class Merged:
    """Weights of a model with adapters, to which their products are added: W + (alpha / r) B A."""

    def __init__(self, weights: Weights, shape: GPTShape) -> None:
        self._weights = weights
        self._shape = shape
        self._sizes = {tensor.name: tensor.parameter.shape for tensor in shape.tensors.all}

    def read(self, name: str, start: int, elements: int) -> Tensor:
        weights = self._weights.read(name, start, elements)
        place, _, kind = name.rpartition(".")
        if kind != "weight" or f"{place}.{ADAPTERS[0]}" not in self._sizes:
            return weights
        a, b = (
            self._weights.read(own, 0, math.prod(self._sizes[own])).view(self._sizes[own])
            for own in (f"{place}.{adapter}" for adapter in ADAPTERS)
        )
        rank = b.shape[1]
        columns = a.shape[1]
        first = start // columns
        last = -(-(start + elements) // columns)
        added = weights.new_zeros(last - first, columns)
        row = 0
        layer = ".".join(place.split(".")[2:])
        for number, rows in enumerate(self._shape.adapter_rows(layer)):
            begin = max(first, row)
            end = min(last, row + rows)
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
            weights = Published(published, listed)
            files = listed.files
    except LlmscaleError as error:
        raise explain_missing(place, saved.path, error, "--base") from None
    check_base(replace(base, checksum=checksum_of(base, files)), saved)
    return weights
