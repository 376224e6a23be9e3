"""Weights that a run begins with or trains adapters beside: found, checked, downloaded, loaded, described.

Weights that transformers wrote are checked before the run begins: their tensors, tokenizer and positions. Those on the
Hugging Face Hub are downloaded and verified once per node, while the other ranks wait. Of the frozen weights beside
adapters, a checkpoint holds only the place and a checksum.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from llmscale.architecture.layers import is_adapter
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import (
    INDEX_SUFFIX,
    StoredTensor,
    TensorSlice,
    WeightsFiles,
    choose_weights,
    find_weights_files,
    has_unused_head,
    list_safetensors,
    load_index,
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
from llmscale.checkpoint.inventory import open_checkpoint
from llmscale.checkpoint.run_state import SavedRun, read_saved_run
from llmscale.config.hf_model import PREFIX, PublishedModel, is_published
from llmscale.config.run_config import RunConfig
from llmscale.config.user_paths import url_of
from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.shards.cache import SetLocation
from llmscale.data.shards.verify_shards import hash_file
from llmscale.data.tokenizers.hugging_face import VOCABULARY_NAMES
from llmscale.errors import CheckpointError, ConfigError, DataError, LlmscaleError
from llmscale.untrusted.hub import (
    cache_of,
    explain_fault,
    fetch_hub_file,
    find_snapshot,
    is_known_absent,
    is_offline,
    list_hub_files,
    offline_variable,
)
from llmscale.untrusted.paths import open_regular

if TYPE_CHECKING:
    import torch.distributed as dist
    from deepspeed import DeepSpeedEngine

    from llmscale.engine.process_group import World

#: Bytes of each end of a file that are hashed: two versions of the weights are sure to differ there.
_FINGERPRINT_BYTES = 1 << 20
#: Files that describe a model and its tokenizer, without code.
_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
#: Interval at which ranks exchange whether the downloads have ended, so that no collective waits longer.
_FIRST_POLL_S = 0.05
_POLL_S = 2.0
#: Form of the Hub's X-Linked-ETag of a large file, which is the name of its file in the cache.
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERIFIED_NAME = ".llmscale-verified"


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
    if files.are_pickles:
        return weights
    return _match(weights, files, list_safetensors(files), location)


def complete_published_weights(
    weights: PublishedWeights, location: SetLocation, world: World, progress: Callable[[], object]
) -> PublishedWeights:
    """Download and verify what is on the Hub, and read pickles. `progress` is called from time to time. Collective.

    Raises DataError, CheckpointError like find_published_weights.
    """
    from llmscale.engine.collectives import gather, on_all_ranks

    model = weights.model
    folder = weights.model.folder if weights.files else None
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
    fingerprints = {}
    for path in weights.files:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(_FINGERPRINT_BYTES))
            file.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(file.read(_FINGERPRINT_BYTES))
        fingerprints[path.name] = f"{size} bytes, {digest.hexdigest()[:16]}"
    return fingerprints


def _may_have_tokenizer(hub_name: str, folder: Path) -> bool:
    """Return whether the Hub may have a vocabulary that the cache lacks; without one only sizes are compared."""
    is_here = any((folder / name).is_file() for name in VOCABULARY_NAMES)
    return not (is_here or is_offline() or all(is_known_absent(hub_name, name) for name in VOCABULARY_NAMES))


def _match(
    weights: PublishedWeights, files: WeightsFiles, stored: Mapping[str, StoredTensor], location: SetLocation
) -> PublishedWeights:
    model = weights.model
    pieces = match_tensors(stored, model.tensors, model.source, model.architecture)
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.tokenizers.load_tokenizer import check_tokenizer_of_weights

    fetch_tokenizer(location)
    notes = [*weights.notes, check_tokenizer_of_weights(location.folder, location.manifest, files.folder)]
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


def _check_positions(model: PublishedModel, location: SetLocation) -> tuple[str, ...]:
    """Compare the length of samples with that of the weights' training; return notes. Raises DataError."""
    made_for = model.shape.seq_len
    seq_len = location.manifest.seq_len
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


@dataclass(frozen=True)
class FrozenBase:
    """Weights beside adapters."""

    place: str
    """Their place, as --init-from names it."""
    source: SavedRun | None = None
    """Their checkpoint; None for a published model."""
    checksum: str = ""
    """Checksum of their files; empty until these are read."""

    def as_dict(self) -> dict[str, str]:
        return {"place": self.place, "checksum": self.checksum}


def base_of_checkpoint(source: SavedRun) -> FrozenBase:
    """Describe a checkpoint's weights. Raises CheckpointError if they are adapters."""
    if source.state.base:
        raise CheckpointError(
            f"{source.path} holds adapters, not a model. Begin with its base, {source.state.base['place']}, or merge "
            "both with `llmscale export RUN --merge --to FOLDER`, and begin with hf:FOLDER."
        )
    return FrozenBase(url_of(source.path) or str(source.path.resolve()), source)


def base_of_published(weights: PublishedWeights) -> FrozenBase:
    """Describe a published model's weights. Raises ConfigError if the run adds experts to it."""
    model = weights.model
    if weights.adds_experts:
        raise ConfigError(
            f"{weights.name} has no experts, and beside adapters their routers would stay random. Leave out "
            "--num-experts, or train a model with experts first and name that run with --init-from."
        )
    return FrozenBase(f"{PREFIX}{model.hub_name or (model.folder or Path(model.name)).resolve()}")


def open_base(place: str) -> FrozenBase:
    """Read the description of the checkpoint at `place`, or take a published model's name. Raises LlmscaleError."""
    if is_published(place):
        return FrozenBase(place)
    return base_of_checkpoint(read_saved_run(open_checkpoint(Path(place))))


def explain_missing(place: str, run: Path, error: LlmscaleError, flag: str = "--init-from") -> CheckpointError:
    """Return the error of a base that is not where it was; `flag` names another place."""
    return CheckpointError(
        f"{run} holds adapters, and their base {place} cannot be read: {error} If it has moved, name its new place "
        f"with {flag}."
    )


def checksum_of(base: FrozenBase, files: Iterable[Path] = ()) -> str:
    """Return the checksum of a base, read whole if it is a published model's `files`; of a checkpoint its manifest has
    the hashes of the files. Raises OSError."""
    if base.source:
        hashes = {file.name: file.xxh3_128 for file in base.source.manifest.files}
    else:
        hashes = {path.name: hash_file(path, "xxh3_128") for path in files}
    return xxhash.xxh3_128("\n".join(f"{name} {digest}" for name, digest in sorted(hashes.items()))).hexdigest()


def check_base(base: FrozenBase, saved: SavedRun) -> None:
    """Raise CheckpointError unless these are the weights that the adapters of a checkpoint were trained beside."""
    wanted = saved.state.base.get("checksum")
    if wanted not in (None, base.checksum):
        raise CheckpointError(
            f"{base.place} holds other weights than those that the adapters of {saved.path} were trained beside: the "
            f"checksum was {wanted} and is {base.checksum}. Put these back, or name their place with --init-from. "
            "Adapters of other weights are a new --run."
        )


class _Download(threading.Thread):
    """Downloads in a thread, so that it may take longer than the timeout of a collective."""

    def __init__(self, name: str, source: str, here: Path | None) -> None:
        """`here` is the complete folder in the cache, or None."""
        super().__init__(daemon=True)
        self._name = name
        self._source = source
        self._cache = cache_of(name.partition("@")[0])
        self._hashed_bytes = 0
        self.folder = here
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.folder = self.folder or _fetch(self._name, self._source)
            self._verify(find_weights_files(self.folder).files)
        except Exception as error:  # raised again in the main thread
            self.failure = error

    def done_bytes(self) -> int:
        """Return a number that grows with progress: bytes in the cache, partial files included, and bytes verified."""
        return self._hashed_bytes + sum(map(_size_bytes, self._cache.glob("blobs/*")))

    def _verify(self, files: Iterable[Path]) -> None:
        """Compare files with the Hub's sha256, once each. Raises CheckpointError."""
        for blob in (path.resolve() for path in files):
            # A cache that was copied without its links does not record the hashes.
            if not _SHA256.fullmatch(blob.name):
                continue
            status = blob.stat()
            note = self._cache / _VERIFIED_NAME / blob.name
            seen = f"{status.st_size} {status.st_mtime_ns}"
            if note.is_file() and note.read_text(errors="replace") == seen:
                continue
            if (digest := hash_file(blob, "sha256", self._count)) != blob.name:
                raise CheckpointError(
                    f"{self._source}: {blob} is damaged: its sha256 is {digest[:12]}..., "
                    f"the Hub's {blob.name[:12]}.... Remove it and run again, which downloads it again."
                )
            with contextlib.suppress(OSError):  # an unwritable cache only costs another verification
                note.parent.mkdir(exist_ok=True)
                note.write_text(seen)

    def _count(self, num_bytes: int) -> None:
        self._hashed_bytes += num_bytes


def provide_model(
    name: str | None, source: str, here: Path | None, world: World, progress: Callable[[], object]
) -> Path:
    """Return the folder with a model's verified weights and JSON files in this node's cache. Collective.

    `name` is NAME@COMMIT, or None for the user's own folder `here`. `here` is the folder if this node has the model;
    otherwise its first rank fetches it. `source` names it in messages. `progress` is called on every rank while any
    download advances. Raises DataError on every rank.
    """
    from llmscale.engine.collectives import gather, on_all_ranks

    if name is None or world.local_rank:
        download = None
    else:
        download = _Download(name, source, here)
    if download is not None:
        download.start()
    before = list[int]()
    wait_s = _FIRST_POLL_S
    while True:
        is_done = download is None or not download.is_alive()
        ranks = gather(world.control, (is_done, download.done_bytes() if download else 0))
        done_bytes = [number for _, number in ranks]
        if done_bytes != before:
            progress()
        if all(is_done for is_done, _ in ranks):
            break
        before = done_bytes
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _POLL_S)

    def outcome() -> Path | None:
        if download is None:
            return here
        if download.failure is not None:
            raise download.failure
        return download.folder

    folders = gather(world.control, on_all_ranks(world.control, outcome))
    folder = folders[world.rank - world.local_rank]
    assert folder is not None
    return folder


def _fetch(name: str, source: str) -> Path:
    """Fetch the description of NAME@COMMIT and its weights in one format, safetensors if available."""
    from huggingface_hub import snapshot_download

    model, _, commit = name.partition("@")
    try:
        if is_offline():
            raise ValueError(f"{offline_variable()} is set")
        main = choose_weights(list_hub_files(name), f"{source} on the Hub")
        *_, path = [fetch_hub_file(model, commit, part) for part in (*_DESCRIPTION, main)]
        if path is None:
            raise ValueError(f"{main} is not there")
        if main.endswith(INDEX_SUFFIX):
            # It takes patterns; a file name may contain their characters.
            shards = [glob.escape(part) for part in {*load_index(path).values()}]
            snapshot_download(model, revision=commit, allow_patterns=shards)
        return path.parent
    except CheckpointError:
        raise
    except Exception as error:  # the library's errors, its transport's, and OSError
        if (cached := _cached_weights(model, commit)) is not None:
            return cached
        raise CheckpointError(
            f"{source} cannot be fetched from the Hugging Face Hub ({explain_fault(error, f'model {name}')}). Download "
            "its weights and JSON files and pass their folder, or log in with HF_TOKEN or `hf auth login` if it needs "
            "permission."
        ) from None


def _cached_weights(model: str, commit: str) -> Path | None:
    """Return the cached folder if it has all weights, even without every description file."""
    folder = find_snapshot(model, commit, "config.json")
    try:
        return folder and find_weights_files(folder).folder
    except CheckpointError:
        return None


def _size_bytes(path: Path) -> int:
    """Return the size of a file, 0 if it was just renamed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
