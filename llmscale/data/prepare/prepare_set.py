"""Text to a prepared set: tokenise, split, pack, shuffle, shard, and put it in place in one move."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmscale.data.prepare.atomic_folder import new_folder, recover
from llmscale.data.prepare.encode_pool import encode_in_order, pieces_of
from llmscale.data.prepare.progress import Progress, show_progress
from llmscale.data.prepare.sources import Source
from llmscale.data.prepare.split_writer import SplitWriter
from llmscale.data.prepare.train_val_split import SplitAssigner, ValidationKeeper, split_score
from llmscale.data.shards.manifest import (
    MANIFEST_NAME,
    Manifest,
    PrepareRequest,
    SplitManifest,
    load_manifest,
)
from llmscale.data.shards.set_rules import HASH_ALGORITHM, MAX_SHARD_BYTES, TOKENIZER_FOLDER, Compression, TokenDtype
from llmscale.data.shards.verify_shards import check_files
from llmscale.data.tokenizers.tokenizer import TokenArray, Tokenizer
from llmscale.errors import DataError

#: What sets are that were prepared before these were settings.
_BEFORE: PrepareRequest = {"tokens before a document": "", "--parse-special-tokens": False}


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare. Raises DataError for values that cannot work."""

    seq_len: int = 1024
    """T: positions a model sees; windows hold T + 1 tokens."""
    val_fraction: float = 0.01
    """Share of documents that go to the val split."""
    seed: int = 0
    """Decides which documents those are, and how the train split's windows are shuffled."""
    shuffle: bool = True
    """Shuffle the windows of train as they are written, so that every shard is a random part of the text."""
    shard_bytes: int = 64 << 20
    """Largest shard, uncompressed: Streaming's default."""
    compression: Compression = ""
    """Of the shard files."""
    parse_special: bool = False
    """Whether the tokenizer was loaded to take special tokens written out in a text for those tokens."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise DataError(f"--seq-len must be at least 1, not {self.seq_len}.")
        if not 0.0 <= self.val_fraction <= 0.5:
            raise DataError(f"--val-fraction must be in [0, 0.5], not {self.val_fraction}.")
        # Streaming stores offsets within a shard as uint32; windows are at most 4 bytes a token and 8 of bookkeeping.
        smallest_bytes = 1024 + 4 * (self.seq_len + 3)
        if not smallest_bytes <= self.shard_bytes <= MAX_SHARD_BYTES:
            raise DataError(
                f"Shards of {self.shard_bytes:,} bytes cannot hold windows of seq_len {self.seq_len}: at least "
                f"{smallest_bytes:,} bytes and less than 4 GiB are needed. Change --shard-mb."
            )
        if self.compression not in ("", "zstd"):
            raise DataError(f"--compression must be zstd or left out, not '{self.compression}'.")


@dataclass(frozen=True)
class Prepared:
    """What `prepare` returns."""

    manifest: Manifest
    reused: bool
    """The set was there already and nothing was done."""
    note: str = ""
    """How the validation split was made, where it is not whole documents."""


@dataclass(frozen=True)
class _Document:
    """A tokenised document, in parts."""

    parts: list[TokenArray]
    num_text_bytes: int
    text_hash: bytes

    @property
    def num_tokens(self) -> int:
        """With the end-of-text token that will follow."""
        return sum(map(len, self.parts)) + 1

    def cut_at(self, num_tokens: int) -> tuple[_Document, _Document]:
        """The first tokens, and the others; bytes of text in proportion."""
        tokens = np.concatenate(self.parts)
        num_bytes = round(self.num_text_bytes * num_tokens / len(tokens))
        first, others = tokens[:num_tokens], tokens[num_tokens:]
        return (
            _Document([first], num_bytes, self.text_hash),
            _Document([others], self.num_text_bytes - num_bytes, self.text_hash),
        )


def prepare(
    source: Source,
    out: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Write the set to `out`, or find that it is there already. The result does not depend on `num_workers`.

    Raises DataError when `out` holds something else, when the source cannot be read or holds too little text,
    and when the disk is full; then `out` is as it was before.
    """
    request = _request(source, tokenizer, options)
    recover(out)
    if _is_already_there(out, request, overwrite=overwrite):
        return Prepared(load_manifest(out), reused=True)
    keeper = ValidationKeeper(options.val_fraction, options.seq_len + 1)
    with new_folder(out, replace=overwrite) as folder:
        manifest = _write_set(source, folder, tokenizer, options, request, num_workers or os.cpu_count() or 1, keeper)
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return Prepared(manifest, reused=False, note=keeper.note)


def _request(source: Source, tokenizer: Tokenizer, options: PrepareOptions) -> PrepareRequest:
    """What makes one set equal to another, by the flag that sets it."""
    return {
        "--input": source.name,
        "contents of --input": source.fingerprint()[:16],
        "--tokenizer": tokenizer.spec,
        "contents of --tokenizer": tokenizer.sha256[:16],
        "tokens before a document": ", ".join(map(str, tokenizer.bos_tokens)),
        "--parse-special-tokens": options.parse_special,
        "--seq-len": options.seq_len,
        "--val-fraction": options.val_fraction,
        "--seed": options.seed,
        "--no-shuffle": not options.shuffle,
        "--shard-mb": options.shard_bytes / (1 << 20),
        "--compression": options.compression,
    }


def _is_already_there(out: Path, request: PrepareRequest, *, overwrite: bool) -> bool:
    """Whether `out` answers the request. Raises DataError when it holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / MANIFEST_NAME).is_file():
        raise DataError(f"{out} exists and is not a prepared set, so it will not be replaced. Choose another --out.")
    if overwrite:
        return False
    manifest = load_manifest(out)
    names = ("--input", "--tokenizer")  # where equal contents lie does not matter
    # A set of an older version lacks settings that did not exist: what they were then, else what is asked now.
    there = request | _BEFORE | manifest.request
    different = [
        f"{key} {there[key]!r} there, {value!r} now"
        for key, value in request.items()
        if key not in names and there[key] != value
    ]
    if different:
        raise DataError(
            f"{out} already holds a set of {manifest.source} prepared differently: {'; '.join(different)}. "
            "Replace it with --overwrite, or choose another --out."
        )
    for split in manifest.splits:
        check_files(out, split, manifest)
    return True


def _write_set(
    source: Source,
    folder: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    request: PrepareRequest,
    num_workers: int,
    keeper: ValidationKeeper,
) -> Manifest:
    dtype: TokenDtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    writers = {
        split: SplitWriter(
            folder / split,
            seq_len=options.seq_len,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            shard_bytes=options.shard_bytes,
            compression=options.compression,
            # Validation takes samples at even distances: of a text in order, they are from all of it.
            shuffle_seed=options.seed if options.shuffle and split == "train" else None,
        )
        for split in ("train", "val")
    }
    texts = _NonEmpty(source.documents())
    with show_progress(f"Tokenising {source.name}", "B") as progress:
        for split, document in keeper.keep(_assigned(texts, tokenizer, options, num_workers, progress)):
            writers[split].add_document(document.parts, tokenizer.eot_token, document.num_text_bytes)
    splits = _finish(writers, folder)
    _check_sizes(splits, source, options)
    tokenizer_files = _save_tokenizer(tokenizer, folder)
    return Manifest(
        tokenizer=tokenizer.spec,
        tokenizer_files=tokenizer_files,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot_token=tokenizer.eot_token,
        seq_len=options.seq_len,
        dtype=dtype,
        hash_algorithm=HASH_ALGORITHM,
        compression=options.compression,
        source=source.name,
        request=request,
        skipped_documents=source.skipped,
        empty_documents=texts.num_empty,
        splits=splits,
    )


def _finish(writers: dict[str, SplitWriter], folder: Path) -> dict[str, SplitManifest]:
    """Close every split; a val split without documents is taken away again."""
    with show_progress("Writing shuffled windows", "B") as progress:
        splits = {split: writer.finish(progress) for split, writer in writers.items()}
    if not splits["val"].num_documents:
        del splits["val"]
        shutil.rmtree(folder / "val")
    return splits


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Copy the tokenizer into the set; its path relative to the set, empty when it needs no files."""
    (folder / TOKENIZER_FOLDER).mkdir()
    saved = tokenizer.save(folder / TOKENIZER_FOLDER)
    if not saved:
        (folder / TOKENIZER_FOLDER).rmdir()
    return f"{TOKENIZER_FOLDER}/{saved}" if saved else ""


class _NonEmpty:
    """Documents that hold text; the others are counted."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.num_empty = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            if text:
                yield text
            else:
                self.num_empty += 1


def _assigned(
    texts: Iterable[str], tokenizer: Tokenizer, options: PrepareOptions, num_workers: int, progress: Progress
) -> Iterator[tuple[str, _Document]]:
    """Every document with its split."""
    assigner = SplitAssigner[_Document](options.val_fraction)
    beginning = [np.array(tokenizer.bos_tokens, np.uint32)] if tokenizer.bos_tokens else []
    parts = list(beginning)
    num_text_bytes = 0
    digest = hashlib.blake2b()
    for piece, tokens in encode_in_order(pieces_of(texts, tokenizer), tokenizer, num_workers):
        contents = piece.text.encode()
        digest.update(contents)
        progress.add(len(contents))
        parts.append(tokens)
        num_text_bytes += len(contents)
        if piece.ends_document:
            document = _Document(parts, num_text_bytes, digest.digest())
            yield from assigner.assign(split_score(document.text_hash, options.seed), document)
            parts, num_text_bytes, digest = list(beginning), 0, hashlib.blake2b()
    yield from assigner.finish()


def _check_sizes(splits: dict[str, SplitManifest], source: Source, options: PrepareOptions) -> None:
    for split, made in splits.items():
        if made.num_samples:
            continue
        remedy = "lower --seq-len or give more text"
        if split == "val":
            remedy = "raise --val-fraction, lower --seq-len, or do without with --val-fraction 0"
        elif "val" in splits and splits["val"].num_documents:
            remedy += f" (val took {splits['val'].num_documents} documents: --val-fraction 0 leaves them in train)"
        raise DataError(
            f"{source.name}: the {split} split holds {made.num_tokens} tokens in {made.num_documents} documents, "
            f"less than one window of {options.seq_len + 1}: {remedy}."
        )
