"""Published weights that a run begins with: found, checked against its data, downloaded, loaded, described.

Weights that transformers wrote are checked before the run begins: their tensors, tokenizer and positions.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.layers import is_adapter
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import (
    StoredTensor,
    TensorSlice,
    WeightsFiles,
    find_weights_files,
    has_unused_head,
    list_safetensors,
    match_tensors,
)
from llmscale.checkpoint.hf_write import (
    CONFIG_NAME,
    GENERATION_NAME,
    POSITIONS,
    POSITIONS_NAME,
    PUBLISHED_NAME,
    open_published,
)
from llmscale.config.hf_model import PREFIX, PublishedModel
from llmscale.config.run_config import RunConfig
from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.shards.cache import SetLocation
from llmscale.data.tokenizers.hugging_face import VOCABULARY_NAMES
from llmscale.errors import CheckpointError, DataError
from llmscale.untrusted.hub import is_known_absent, is_offline
from llmscale.untrusted.paths import open_regular

if TYPE_CHECKING:
    import torch.distributed as dist
    from deepspeed import DeepSpeedEngine

    from llmscale.engine.process_group import World

#: Bytes of each end of a file that are hashed: two versions of the weights are sure to differ there.
_FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class PublishedWeights:
    """A published model whose weights a run begins with."""

    model: PublishedModel
    shape: GPTShape
    """Shape of the run's model; it may have experts where the published one has none."""
    files: tuple[Path, ...] = ()
    pieces: Mapping[str, tuple[TensorSlice, ...]] | None = None
    """Sources of each of our parameters; None until torch has read a pickle, or the Hub has sent the files."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""

    @property
    def adds_experts(self) -> bool:
        """True when the experts begin as copies of the published model's MLPs."""
        return self.shape.num_experts > 0 and not self.model.shape.num_experts

    @property
    def name(self) -> str:
        """The model as --init-from names it."""
        return f"{PREFIX}{self.model.hub_name or self.model.name}"


def find_published_weights(model: PublishedModel, shape: GPTShape, location: SetLocation) -> PublishedWeights:
    """Check everything that needs neither torch nor the network.

    Raises DataError if the dataset does not suit these weights, CheckpointError if tensors are missing, of other
    shapes, or too many.
    """
    weights = PublishedWeights(model, shape, notes=_check_positions(model, location))
    try:
        # On the Hub alone: it must be downloaded, and the cache may have a part of it.
        if model.folder is None:
            return weights
        files = find_weights_files(model.folder)
    except CheckpointError:
        if model.hub_name is None:
            raise
        return weights
    if model.hub_name is not None and _may_have_tokenizer(model.hub_name, files.folder):
        return weights
    weights = replace(weights, files=files.files)
    return weights if files.are_pickles else _match(weights, files, list_safetensors(files), location)


def complete_published_weights(
    weights: PublishedWeights, location: SetLocation, world: World, progress: Callable[[], object]
) -> PublishedWeights:
    """Download and verify what is on the Hub, and read pickles. `progress` is called from time to time. Collective.

    Raises DataError, CheckpointError like find_published_weights.
    """
    from llmscale.checkpoint.hub_download import provide_model
    from llmscale.engine.collectives import gather, on_all_ranks

    model, folder = weights.model, weights.model.folder if weights.files else None
    if any(gather(world.control, model.hub_name is not None)):
        folder = provide_model(model.hub_name, model.source, folder, world, progress)

    def complete() -> PublishedWeights:
        from llmscale.checkpoint.hf_read import list_tensors

        if weights.pieces is not None:
            return weights
        assert folder is not None
        files = find_weights_files(folder)
        return _match(replace(weights, model=replace(model, folder=folder)), files, list_tensors(files), location)

    return on_all_ranks(world.control, complete)


def load_published_weights(
    engine: DeepSpeedEngine, weights: PublishedWeights, group: dist.ProcessGroup, progress: Callable[[], object]
) -> None:
    """Fill this rank's part of the parameters, except adapters; the optimizer starts from scratch. Collective.

    `progress` is called before each parameter is read. Raises CheckpointError on every rank.
    """
    from llmscale.checkpoint.hf_read import fill_view
    from llmscale.engine.collectives import on_all_ranks
    from llmscale.engine.zero_shards import refresh_low_precision_weights, weights_to_fill

    assert weights.pieces is not None
    pieces = weights.pieces

    def fill() -> None:
        left = set(pieces)
        for views in weights_to_fill(engine):
            for name, view in views.items():
                if is_adapter(name) or (weights.adds_experts and ".router." in name):
                    continue
                if name not in pieces:
                    raise CheckpointError(f"{weights.name} has no '{name}': its config.json describes another model.")
                progress()
                fill_view(view, pieces[name])
                left.discard(name)
        if left:
            raise CheckpointError(f"{weights.name} holds '{min(left)}', which this run's model has no place for.")

    on_all_ranks(group, fill)
    refresh_low_precision_weights(engine)


def keep_published(
    weights: PublishedWeights | None, seq_len: int, source: Path | None, run: Path, config: RunConfig
) -> None:
    """Copy the published model's configurations, and its positions beyond seq_len, to a new run folder.

    A run that begins with the checkpoint `source` copies what that run kept. Raises LlmscaleError, OSError.
    """
    if (run / PUBLISHED_NAME).exists():
        return
    model = weights.model if weights else None
    if source is not None:
        model = open_published(source.resolve().parents[1], config)
    place = model.folder if model is not None else None
    if place is None or not (place / CONFIG_NAME).is_file():
        return
    with new_folder(run / PUBLISHED_NAME, replace=False) as folder:
        for name in (CONFIG_NAME, GENERATION_NAME, POSITIONS_NAME):
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
        if weights is not None and weights.pieces is not None and POSITIONS in weights.pieces:
            _save_positions(weights.model.shape, weights.pieces[POSITIONS], seq_len, folder / POSITIONS_NAME)


def _save_positions(shape: GPTShape, pieces: Sequence[TensorSlice], seq_len: int, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from llmscale.checkpoint.hf_read import fill_view
    from llmscale.engine.zero_layout import ShardView

    rows = torch.empty(shape.seq_len - seq_len, shape.n_embd)
    fill_view(ShardView(rows.view(-1), seq_len * shape.n_embd, shape.seq_len * shape.n_embd), pieces)
    save_file({POSITIONS: rows}, path)


def fingerprint_weights(weights: PublishedWeights) -> dict[str, str]:
    """Return each file's size and a hash of its two ends, which differ between versions."""
    return {path.name: _fingerprint(path) for path in weights.files}


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(_FINGERPRINT_BYTES))
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        digest.update(file.read(_FINGERPRINT_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def _may_have_tokenizer(hub_name: str, folder: Path) -> bool:
    """Return whether the Hub may have a vocabulary that the cache lacks; without one only sizes are compared."""
    is_here = any((folder / name).is_file() for name in VOCABULARY_NAMES)
    return not (is_here or is_offline() or all(is_known_absent(hub_name, name) for name in VOCABULARY_NAMES))


def _match(
    weights: PublishedWeights, files: WeightsFiles, stored: Mapping[str, StoredTensor], location: SetLocation
) -> PublishedWeights:
    model = weights.model
    pieces = match_tensors(stored, model.tensors, model.source, model.architecture)
    notes = [*weights.notes, _check_tokenizer(files.folder, location)]
    if has_unused_head(stored, pieces):
        notes.append(
            "lm_head.weight is in the files and not read: by config.json the head is the token embedding, as "
            "transformers has it too"
        )
    if weights.adds_experts:
        pieces = _copy_to_experts(pieces, weights.shape)
        notes.append(_describe_copies(weights.shape))
    return replace(weights, files=files.files, pieces=pieces, notes=tuple(notes))


def _copy_to_experts(
    pieces: Mapping[str, tuple[TensorSlice, ...]], shape: GPTShape
) -> dict[str, tuple[TensorSlice, ...]]:
    """Return sources that make each expert a copy of the MLP in its place (Komatsuzaki et al. 2022)."""
    sources = dict(pieces)
    for block in filter(shape.is_sparse, range(shape.n_layer)):
        for layer in ("up", "down"):
            copied = sources.pop(f"blocks.{block}.mlp.{layer}.weight")
            rows = sum(piece.num_rows for piece in copied)
            sources[f"blocks.{block}.mlp.experts.{layer}"] = tuple(
                replace(piece, wanted=replace(piece.wanted, first_row=piece.first_row + expert * rows))
                for expert in range(shape.num_experts)
                for piece in copied
            )
    return sources


def _describe_copies(shape: GPTShape) -> str:
    sparse = sum(map(shape.is_sparse, range(shape.n_layer)))
    text = (
        f"{shape.num_experts} experts in {sparse} of {shape.n_layer} blocks begin as copies of the MLP, routers random"
    )
    if shape.normalize_router and shape.router_scale == 1:
        return f"{text}: the first loss is the original model's"
    normalize = str(shape.normalize_router).lower()
    return (
        f"{text}; with normalize_router {normalize} and router_scale {shape.router_scale:g} the first loss is not the "
        "original model's; with true and 1 it would be"
    )


def _check_tokenizer(folder: Path, location: SetLocation) -> str:
    """Raise DataError unless the dataset has the tokenizer that the weights were trained with; return a note."""
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.tokenizers.load_tokenizer import check_tokenizer_of_weights

    fetch_tokenizer(location)
    return check_tokenizer_of_weights(location.folder, location.manifest, folder)


def _check_positions(model: PublishedModel, location: SetLocation) -> tuple[str, ...]:
    """Compare the length of samples with that of the weights' training; return notes. Raises DataError."""
    made_for, seq_len = model.shape.seq_len, location.manifest.seq_len
    if seq_len == made_for:
        return ()
    if model.shape.positions == "rotary":
        if seq_len < made_for:
            return ()
        return (
            f"samples have {seq_len:,} tokens and config.json says {made_for:,} positions: rotary positions continue, "
            "but the weights have not seen the longer distances; --rope-theta and --rope-scaling stay as they are",
        )
    if seq_len > made_for:
        raise DataError(
            f"{location.name} has samples of {seq_len:,} tokens, and {model.source} has learned positions for "
            f"{made_for:,}. Prepare the data with --seq-len {made_for} or less."
        )
    return (f"positions {seq_len:,} to {made_for - 1:,} of the weights are left out: samples have {seq_len:,} tokens",)
