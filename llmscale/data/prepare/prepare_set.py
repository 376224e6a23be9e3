"""Text to a prepared set: tokenise, split, pack, shuffle, shard, and put it in place in one move."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llmscale.data.prepare.atomic_folder import put_in_place, recover, sync_tree
from llmscale.data.prepare.batches import Mark
from llmscale.data.prepare.encoder import EncoderName
from llmscale.data.prepare.progress import show_progress
from llmscale.data.prepare.quarantine import Quarantine, rejected_path
from llmscale.data.prepare.resume_state import ResumeState, load_resume_state
from llmscale.data.prepare.shard_files import ShardFiles
from llmscale.data.prepare.sources.source import Source
from llmscale.data.prepare.split_writer import SplitWriter
from llmscale.data.prepare.tokenise import Distributor, tokenise
from llmscale.data.prepare.work_folder import WorkFolder, open_work_folder, remove_finished
from llmscale.data.shards.manifest import (
    MANIFEST_NAME,
    Manifest,
    PrepareRequest,
    SplitManifest,
    load_manifest,
)
from llmscale.data.shards.set_rules import HASH_ALGORITHM, MAX_SHARD_BYTES, TOKENIZER_FOLDER, Compression, TokenDtype
from llmscale.data.shards.verify_shards import check_files
from llmscale.data.tokenizers.tokenizer import Tokenizer
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
    num_rejected: int = 0
    """Records that are no documents, set aside in `rejected_path`."""
    num_cut: int = 0
    """Texts of which several documents were made, because they are too long for one."""


def prepare(
    source: Source,
    out: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    encoder: EncoderName = "auto",
    max_rejected: int = 0,
) -> Prepared:
    """Write the set to `out`, or find that it is there already. The result does not depend on `num_workers`, on the
    `encoder`, or on how often the work was interrupted.

    Up to `max_rejected` records that are no documents are set aside. Raises DataError when `out` holds something else,
    when the source cannot be read or holds too little text, and when the disk is full; then `out` is as it was before.
    """
    request = _request(source, tokenizer, options)
    recover(out)
    if _is_already_there(out, request, overwrite=overwrite):
        remove_finished(out)
        return Prepared(load_manifest(out), reused=True)
    with open_work_folder(out, request) as work:
        prepared = _write_set(
            source,
            work,
            tokenizer,
            options,
            request,
            num_workers or os.cpu_count() or 1,
            encoder,
            Quarantine(rejected_path(out), max_rejected),
        )
        sync_tree(work.set_folder)
        put_in_place(work.set_folder, out, replace=overwrite)
    return prepared


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
    work: WorkFolder,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    request: PrepareRequest,
    num_workers: int,
    encoder: EncoderName,
    quarantine: Quarantine,
) -> Prepared:
    dtype: TokenDtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    state = load_resume_state(work)
    quarantine.go_on(*(state.quarantine if state else (0, 0)))
    work.set_folder.mkdir(exist_ok=True)
    writers = {split: _open_writer(split, work, tokenizer, options, dtype, state) for split in ("train", "val")}
    mark, note = (state.mark, state.note) if state else (Mark(), "")
    with show_progress(f"Tokenising {source.name}") as progress:
        if work.replaced_other:
            progress.say(f"What an interrupted prepare with other settings or input left in {work.path} is gone.")
        if state is not None:
            progress.say(f"Going on behind {state.num_documents:,} documents of an interrupted run.")
        if state is None or not state.is_read:
            distributor = Distributor(
                writers,
                work,
                quarantine,
                val_fraction=options.val_fraction,
                window=options.seq_len + 1,
                seed=options.seed,
                state=state,
            )
            with closing(distributor):
                tokenise(
                    source, tokenizer, distributor, progress, dtype=dtype, encoder=encoder, num_workers=num_workers
                )
                distributor.finish()
            mark, note = distributor.mark, distributor.note
    splits = _finish(writers, work.set_folder)
    _check_sizes(splits, source, options)
    manifest = Manifest(
        tokenizer=tokenizer.spec,
        tokenizer_files=_save_tokenizer(tokenizer, work.set_folder),
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot_token=tokenizer.eot_token,
        seq_len=options.seq_len,
        dtype=dtype,
        hash_algorithm=HASH_ALGORITHM,
        compression=options.compression,
        source=source.name,
        request=request,
        skipped_documents=mark.num_skipped + mark.num_rejected,
        empty_documents=mark.num_empty,
        splits=splits,
    )
    (work.set_folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return Prepared(manifest, reused=False, note=note, num_rejected=mark.num_rejected, num_cut=mark.num_cut)


def _open_writer(
    split: str,
    work: WorkFolder,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    dtype: TokenDtype,
    state: ResumeState | None,
) -> SplitWriter:
    files = ShardFiles(
        work.set_folder / split,
        work.path / f"{split}.shards.jsonl",
        seq_len=options.seq_len,
        dtype=dtype,
        shard_bytes=options.shard_bytes,
        compression=options.compression,
    )
    return SplitWriter(
        files,
        work.path / f"{split}.windows",
        seq_len=options.seq_len,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        # Validation takes samples at even distances: of a text in order, they are from all of it.
        shuffle_seed=options.seed if options.shuffle and split == "train" else None,
        state=state.splits[split] if state else None,
    )


def _finish(writers: dict[str, SplitWriter], folder: Path) -> dict[str, SplitManifest]:
    """Close every split; a val split without documents is taken away again."""
    total_bytes = sum(writer.num_window_bytes for writer in writers.values())
    with show_progress("Writing shards", total_bytes) as progress:
        splits = {split: writer.finish(progress.add) for split, writer in writers.items()}
    if not splits["val"].num_documents:
        del splits["val"]
        shutil.rmtree(folder / "val")
    return splits


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Copy the tokenizer into the set; its path relative to the set, empty when it needs no files."""
    shutil.rmtree(folder / TOKENIZER_FOLDER, ignore_errors=True)
    (folder / TOKENIZER_FOLDER).mkdir()
    saved = tokenizer.save(folder / TOKENIZER_FOLDER)
    if not saved:
        (folder / TOKENIZER_FOLDER).rmdir()
    return f"{TOKENIZER_FOLDER}/{saved}" if saved else ""


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
