"""Weights that transformers wrote, held against a run before it begins: their tensors, tokenizer and positions."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_files import StoredTensor, WeightsFiles, find_weights_files, list_safetensors
from llmscale.checkpoint.hf_folder import CONFIG_NAME, GENERATION_NAME
from llmscale.checkpoint.hf_match import Piece, has_unused_head, match_tensors
from llmscale.checkpoint.published_files import POSITIONS, POSITIONS_NAME, PUBLISHED_NAME, open_published
from llmscale.config.hf_model import PublishedModel
from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.shards.cache import SetLocation
from llmscale.data.tokenizers.hugging_face import VOCABULARY_NAMES
from llmscale.errors import CheckpointError, DataError
from llmscale.untrusted.hub import is_known_absent, is_offline
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
    try:
        # On the Hub alone: it must be fetched, and the cache may have a part of it.
        if model.folder is None:
            return found
        files = find_weights_files(model.folder)
    except CheckpointError:
        if model.hub_name is None:
            raise
        return found
    if model.hub_name is not None and _may_have_tokenizer(model.hub_name, files.folder):
        return found
    found = replace(found, files=files.files)
    return found if files.are_pickles else _match(found, files, list_safetensors(files), location)


def complete_published_weights(
    found: FoundWeights, location: SetLocation, world: World, progress: Callable[[], object]
) -> FoundWeights:
    """The rest: download what is on the Hub and verify it, look into a pickle. Collective; `progress` is called while
    it gets on. Raises as find_published_weights."""
    from llmscale.checkpoint.hub_download import provide_model
    from llmscale.engine.collectives import gather, together

    model, folder = found.model, found.model.folder if found.files else None
    if any(gather(world.control, model.hub_name is not None)):
        folder = provide_model(model.hub_name, model.source, folder, world, progress)

    def complete() -> FoundWeights:
        from llmscale.checkpoint.hf_tensors import list_tensors

        if found.pieces is not None:
            return found
        assert folder is not None
        files = find_weights_files(folder)
        return _match(replace(found, model=replace(model, folder=folder)), files, list_tensors(files), location)

    return together(world.control, complete)


def keep_published(found: FoundWeights | None, seq_len: int, source: Path | None, run: Path) -> None:
    """Keep in a new run folder the configurations of the model whose weights it begins with, and the positions beyond
    its sequences; or what the run of the checkpoint `source` kept. Raises LlmscaleError, OSError."""
    if (run / PUBLISHED_NAME).exists():
        return
    model = open_published(source.resolve().parents[1]) if source is not None else found.model if found else None
    place = model.folder if model is not None else None
    if place is None or not (place / CONFIG_NAME).is_file():
        return
    with new_folder(run / PUBLISHED_NAME, replace=False) as folder:
        for name in (CONFIG_NAME, GENERATION_NAME, POSITIONS_NAME):
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
        if found is not None and found.pieces is not None and POSITIONS in found.pieces:
            _save_positions(found.model.shape, found.pieces[POSITIONS], seq_len, folder / POSITIONS_NAME)


def _save_positions(shape: GPTShape, pieces: Sequence[Piece], seq_len: int, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from llmscale.checkpoint.hf_tensors import fill_view
    from llmscale.engine.zero_layout import ShardView

    rows = torch.empty(shape.seq_len - seq_len, shape.n_embd)
    fill_view(ShardView(rows.view(-1), seq_len * shape.n_embd, shape.seq_len * shape.n_embd), pieces)
    save_file({POSITIONS: rows}, path)


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


def _may_have_tokenizer(hub_name: str, folder: Path) -> bool:
    """Whether a cached model lacks the vocabulary that the Hub may have of it: without one only sizes are compared."""
    is_here = any((folder / name).is_file() for name in VOCABULARY_NAMES)
    return not (is_here or is_offline() or all(is_known_absent(hub_name, name) for name in VOCABULARY_NAMES))


def _match(
    found: FoundWeights, files: WeightsFiles, stored: Mapping[str, StoredTensor], location: SetLocation
) -> FoundWeights:
    model = found.model
    pieces = match_tensors(stored, model.tensors, model.source, model.architecture)
    notes = [*found.notes, *_check_tokenizer(files.folder, location)]
    if has_unused_head(stored, pieces):
        notes.append(
            "lm_head.weight is in the files and not read: by config.json the head is the token embedding, as "
            "transformers has it too"
        )
    return replace(found, files=files.files, pieces=pieces, notes=tuple(notes))


def _check_tokenizer(folder: Path, location: SetLocation) -> list[str]:
    """Weights mean tokens: they are of use only with the tokenizer that they were trained with."""
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.tokenizers.load_tokenizer import check_tokenizer_of_weights

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
