"""Weights that transformers wrote, held against a run before it begins: their tensors, tokenizer and positions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.hf_files import StoredTensor, WeightsFiles, find_weights_files, list_safetensors
from llmscale.checkpoint.hf_match import Piece, has_unused_head, match_tensors
from llmscale.config.hf_model import PREFIX, PublishedModel, read_published_model
from llmscale.data.shards.dataset_source import SetLocation
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.untrusted.paths import open_regular

if TYPE_CHECKING:
    from llmscale.engine.process_group import World

#: Of each end of a file, where two versions of the weights are sure to differ.
_FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class FoundWeights:
    """A published model whose weights a run begins with."""

    model: PublishedModel
    files: tuple[Path, ...] = ()
    pieces: Mapping[str, tuple[Piece, ...]] | None = None
    """What makes each of our parameters; None until torch has read a pickle, or the Hub has sent the files."""
    notes: tuple[str, ...] = ()
    """What the user should know, a line each."""


def find_published_weights(model: PublishedModel, location: SetLocation) -> FoundWeights:
    """Everything that can be checked without torch and the network.

    Raises DataError when the data set is of no use to these weights, CheckpointError when tensors are missing, of other
    shapes, or too many.
    """
    found = FoundWeights(model, notes=_check_positions(model, location))
    if model.folder is None:
        return found
    try:
        files = find_weights_files(model.folder)
    except CheckpointError:
        if model.folder == Path(model.name):
            raise
        # The Hub's cache has a part of it.
        return replace(found, model=replace(model, folder=None))
    if files.are_pickles:
        return replace(found, files=files.files)
    return _match(found, files, list_safetensors(files), location)


def complete_published_weights(found: FoundWeights, location: SetLocation, world: World) -> FoundWeights:
    """The rest: download what is on the Hub, look into a pickle. Collective. Raises as find_published_weights."""
    from llmscale.checkpoint.hub_download import download_model
    from llmscale.engine.collectives import gather, together

    model, folder = found.model, found.model.folder
    if not all(gather(world.control, folder is not None)):
        folder = download_model(model.name, model.source, folder, world)

    def complete() -> FoundWeights:
        from llmscale.checkpoint.hf_tensors import list_tensors

        if found.pieces is not None:
            return found
        assert folder is not None
        complete_model = _reread(model, folder) if model.folder is None else model
        files = find_weights_files(folder)
        return _match(replace(found, model=complete_model), files, list_tensors(files), location)

    return together(world.control, complete)


def fingerprint_weights(found: FoundWeights) -> dict[str, str]:
    """What tells two versions of the files apart: the size of each, and a hash of its two ends."""
    return {path.name: _fingerprint(path) for path in found.files}


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(_FINGERPRINT_BYTES))
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        digest.update(file.read(_FINGERPRINT_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def _reread(model: PublishedModel, folder: Path) -> PublishedModel:
    """The model as the files describe it that were downloaded."""
    fetched = read_published_model(model.source.split()[0], f"{PREFIX}{folder}")
    if fetched.shape != model.shape:
        raise ConfigError(
            f"{model.source}: the Hub's files changed while they were fetched, and are of another shape. Start again."
        )
    return replace(fetched, source=model.source, name=model.name)


def _match(
    found: FoundWeights, files: WeightsFiles, stored: Mapping[str, StoredTensor], location: SetLocation
) -> FoundWeights:
    model = found.model
    pieces = match_tensors(stored, model.tensors, model.source)
    notes = [*found.notes, *_check_tokenizer(files.folder, location)]
    if has_unused_head(stored, pieces):
        notes.append(
            "lm_head.weight is in the files and not read: by config.json the head is the token embedding, as "
            "transformers has it too"
        )
    return replace(found, files=files.files, pieces=pieces, notes=tuple(notes))


def _check_tokenizer(folder: Path, location: SetLocation) -> list[str]:
    """Weights mean tokens: they are of use only with the tokenizer that they were trained with."""
    from llmscale.data.shards.dataset_source import fetch_tokenizer
    from llmscale.data.tokenizers.belongs_to_weights import check_tokenizer_of_weights

    fetch_tokenizer(location)
    return [check_tokenizer_of_weights(location.folder, location.manifest, folder)]


def _check_positions(model: PublishedModel, location: SetLocation) -> tuple[str, ...]:
    """Whether the set's samples are as long as the weights were trained for, and what follows when they are not."""
    made_for, seq_len = model.shape.seq_len, location.manifest.seq_len
    if seq_len == made_for:
        return ()
    if model.shape.positions == "rotary":
        if seq_len < made_for:
            return ()
        return (
            f"samples have {seq_len:,} tokens and config.json says {made_for:,} positions: rotary positions go on, but "
            "the weights have not seen the longer distances; --rope-theta and --rope-scaling stay as they are",
        )
    if seq_len > made_for:
        raise DataError(
            f"{location.name} has samples of {seq_len:,} tokens, and {model.source} has learned positions for "
            f"{made_for:,}. Prepare the data with --seq-len {made_for} or less."
        )
    return (f"positions {seq_len:,} to {made_for - 1:,} of the weights are left out: samples have {seq_len:,} tokens",)
