"""Text to a prepared set: tokenise, split, pack, shuffle, shard, and put it in place in one move."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llmscale.data.prepare.encoder import EncoderName
from llmscale.data.prepare.output_folder import (
    Destination,
    LocalFolder,
    Quarantine,
    WorkFolder,
    open_work_folder,
    rejected_path,
    remove_finished,
)
from llmscale.data.prepare.sources.source import Source
from llmscale.data.prepare.split_writer import ShardFiles, SplitWriter
from llmscale.data.prepare.tokenise import Distributor, Mark, ResumeState, load_resume_state, tokenise
from llmscale.data.shards.manifest import (
    HASH_ALGORITHM,
    MANIFEST_NAME,
    MAX_SHARD_BYTES,
    TOKENIZER_FOLDER,
    Compression,
    Manifest,
    PrepareRequest,
    SplitManifest,
    TokenDtype,
)
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import DataError
from llmscale.terminal.progress import show_progress


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
    out: Path | Destination,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    encoder: EncoderName = "auto",
    max_rejected: int = 0,
) -> Prepared:
    """Write the set to `out`, a folder (`overwrite`: in place of what is there) or another destination, or find that it
    is there already. The result does not depend on `num_workers`, on the `encoder`, or on how often the work was
    interrupted.

    Up to `max_rejected` records that are no documents are set aside. Raises DataError when `out` holds something else,
    when the source cannot be read or holds too little text, and when the disk is full; then `out` is as it was before.
    """
    destination = LocalFolder(out, overwrite=overwrite) if isinstance(out, Path) else out
    request = _request(source, tokenizer, options)
    with closing(destination):
        manifest = destination.find(request)
        if manifest is not None:
            remove_finished(destination.beside)
            return Prepared(manifest, reused=True)
        with open_work_folder(destination.beside, request) as work:
            destination.begin(work, request)
            prepared = _write_set(
                source,
                work,
                destination,
                tokenizer,
                options,
                request,
                num_workers or os.cpu_count() or 1,
                encoder,
                Quarantine(rejected_path(destination.beside), max_rejected),
            )
            destination.finish(work)
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


def _write_set(
    source: Source,
    work: WorkFolder,
    destination: Destination,
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
    writers = {
        split: _open_writer(split, work, destination, tokenizer, options, dtype, state) for split in ("train", "val")
    }
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
                # A shard that has left this disk must not be needed again.
                is_always_kept=destination.is_remote,
            )
            with closing(distributor):
                tokenise(
                    source, tokenizer, distributor, progress, dtype=dtype, encoder=encoder, num_workers=num_workers
                )
                distributor.finish()
            mark, note = distributor.mark, distributor.note
    try:
        _check_sizes(writers, source, options)
    except DataError:
        work.begin_anew()  # the same command could only find the same
        raise
    splits = _finish(writers, work.set_folder)
    manifest = _write_manifest(work.set_folder, tokenizer, options, dtype, source.name, request, mark, splits)
    return Prepared(manifest, reused=False, note=note, num_rejected=mark.num_rejected, num_cut=mark.num_cut)


def _write_manifest(
    folder: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    dtype: TokenDtype,
    source: str,
    request: PrepareRequest,
    mark: Mark,
    splits: dict[str, SplitManifest],
) -> Manifest:
    """And the tokenizer's files. `mark` is behind the last record."""
    manifest = Manifest(
        tokenizer=tokenizer.spec,
        tokenizer_files=_save_tokenizer(tokenizer, folder),
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot_token=tokenizer.eot_token,
        seq_len=options.seq_len,
        dtype=dtype,
        hash_algorithm=HASH_ALGORITHM,
        compression=options.compression,
        source=source,
        request=request,
        skipped_documents=mark.num_skipped + mark.num_rejected,
        empty_documents=mark.num_empty,
        splits=splits,
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _open_writer(
    split: str,
    work: WorkFolder,
    destination: Destination,
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
        keep=destination.keep_shard,
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


def _check_sizes(writers: dict[str, SplitWriter], source: Source, options: PrepareOptions) -> None:
    """Before a shard is written. Raises DataError."""
    made = {split: writer for split, writer in writers.items() if writer.num_documents or split == "train"}
    for split, writer in made.items():
        if writer.num_windows:
            continue
        remedy = "lower --seq-len or give more text"
        if split == "val":
            remedy = "raise --val-fraction, lower --seq-len, or do without with --val-fraction 0"
        elif "val" in made:
            remedy += f" (val took {made['val'].num_documents} documents: --val-fraction 0 leaves them in train)"
        raise DataError(
            f"{source.name}: the {split} split holds {writer.num_tokens} tokens in {writer.num_documents} documents, "
            f"less than one window of {options.seq_len + 1}: {remedy}."
        )
