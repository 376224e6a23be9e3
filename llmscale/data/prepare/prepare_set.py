"""Run `llmscale data prepare`: tokenise, split, pack, shuffle and shard text, then publish the dataset in one move."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.chat import TOO_LONG, ChatEncoder, ChatSettings
from llmscale.data.prepare.encoder import EncoderName
from llmscale.data.prepare.output_folder import (
    Destination,
    LocalFolder,
    RejectedRecords,
    WorkFolder,
    open_work_folder,
    rejected_path,
    remove_finished,
)
from llmscale.data.prepare.packing import BestFitPacking, ConversationPacking, Packing, PackingState, StreamPacking
from llmscale.data.prepare.sources.formats import MAX_TEXT_BYTES
from llmscale.data.prepare.sources.source import PassedOver, Source, describe_passed_over
from llmscale.data.prepare.split_writer import ShardFiles, SplitWriter
from llmscale.data.prepare.tokenise import (
    ReadPosition,
    ResumeState,
    SplitRouter,
    bytes_of_tokens,
    load_resume_state,
    tokenise,
)
from llmscale.data.shards.manifest import (
    HASH_ALGORITHM,
    MANIFEST_NAME,
    MAX_SHARD_BYTES,
    TOKENIZER_FOLDER,
    ChatFacts,
    Compression,
    Manifest,
    PackingName,
    PrepareRequest,
    SplitManifest,
    TokenDtype,
)
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import DataError
from llmscale.terminal.human_numbers import count_nouns
from llmscale.terminal.progress import show_progress

#: Counts changes of what the same conversations and template become.
_READING = 2


@dataclass(frozen=True)
class PrepareOptions:
    """Settings of a dataset. Raises DataError for invalid values."""

    seq_len: int = 1024
    """T: positions that a model sees; windows hold T + 1 tokens."""
    val_fraction: float = 0.01
    """Share of documents for the val split."""
    seed: int = 0
    """Seed of the choice of those documents and of the shuffle of the train windows."""
    shuffle: bool = True
    """Shuffle the train windows, so that every shard is a random part of the text."""
    shard_bytes: int = 64 << 20
    """Largest uncompressed shard; the default is Streaming's."""
    compression: Compression = ""
    """Compression of the shard files."""
    packing: PackingName = "stream"
    """How documents become windows."""
    parse_special: bool = False
    """True if the tokenizer parses special tokens in text."""
    chat: ChatSettings | None = None
    """Choices of conversations; None for text."""

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
    """Result of `prepare`."""

    manifest: Manifest
    reused: bool
    """True if the dataset already existed and nothing was done."""
    note: str = ""
    """How validation was split off, if not by documents."""
    num_rejected: int = 0
    """Rejected records, which are in `rejected_path`."""
    num_cut: int = 0
    """Texts that were cut into several documents because they are too long."""


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
    """Write a dataset to `out`, a folder or another destination, unless it already exists. `overwrite` replaces another
    dataset in a folder. The result does not depend on `num_workers`, `encoder` or interruptions.

    Up to `max_rejected` malformed records are skipped. Raises DataError when `out` holds something else, the source is
    unreadable or too short, or the disk is full; then `out` is unchanged.
    """
    destination = LocalFolder(out, overwrite=overwrite) if isinstance(out, Path) else out
    request = _request(source, tokenizer, options)
    rejected = RejectedRecords(rejected_path(destination.beside), max_rejected)
    with closing(destination):
        manifest = destination.find(request)
        if manifest is not None:
            remove_finished(destination.beside)
            return Prepared(manifest, reused=True)
        with open_work_folder(destination.beside, request) as work:
            if not work.has_state():
                source.check()
            destination.begin(work, request)
            job = _Job(source, work, destination, tokenizer, options, request)
            prepared = job.write(num_workers or os.cpu_count() or 1, encoder, rejected)
            destination.finish(work)
    return prepared


def describe_reading(passed_over: Collection[PassedOver], out: Path, num_rejected: int, num_cut: int) -> Iterator[str]:
    """Yield notes on skipped and divided text."""
    if num_rejected:
        yield f"Skipped {count_nouns(num_rejected, 'malformed record')}; see {rejected_path(out)}."
    if num_cut:
        yield f"Divided {count_nouns(num_cut, 'text')} of more than {MAX_TEXT_BYTES >> 20} MiB into documents of 1 MiB."
    yield from describe_passed_over(passed_over)


def _request(source: Source, tokenizer: Tokenizer, options: PrepareOptions) -> PrepareRequest:
    """Return everything that decides the contents of a dataset, by flag."""
    chat: PrepareRequest = {}
    if options.chat is not None:
        digest = hashlib.sha256(options.chat.template.source.encode()).hexdigest()
        chat = {"--train-on": options.chat.train_on, "--truncate": options.chat.truncates}
        chat["contents of the chat template"] = digest[:16]
        chat["reading of conversations"] = _READING
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
        "--packing": options.packing,
        **chat,
    }


@dataclass(frozen=True)
class _Job:
    """A dataset that is written."""

    source: Source
    work: WorkFolder
    destination: Destination
    tokenizer: Tokenizer
    options: PrepareOptions
    request: PrepareRequest

    @property
    def dtype(self) -> TokenDtype:
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    def write(self, num_workers: int, encoder: EncoderName, rejected: RejectedRecords) -> Prepared:
        """Write the shards and the manifest into the work folder. Raises DataError, OSError."""
        state = load_resume_state(self.work)
        chat = self.options.chat
        rejected.resume(*(state.rejected if state else (0, 0)))
        writers = {split: self._open_writer(split, state) for split in ("train", "val")}
        with show_progress(f"Tokenising {self.source.name}") as progress:
            if self.work.replaced_other:
                progress.say(
                    f"Discarded unfinished work in {self.work.path}: it was started with different settings or input."
                )
            if state is not None:
                progress.say(f"Resuming after {state.num_documents:,} documents of an interrupted run.")
            if state is None or not state.is_read:
                router = SplitRouter(
                    writers,
                    self.work,
                    rejected,
                    self.tokenizer,
                    state,
                    val_fraction=self.options.val_fraction,
                    window=self.options.seq_len + 1,
                    seed=self.options.seed,
                    keeps_order=not self.options.shuffle,
                    # An uploaded shard is removed here, so it must never be written again.
                    is_always_kept=self.destination.is_remote,
                    cuts_documents=chat is None,
                )
                chosen = encoder if chat is None else ChatEncoder(self.tokenizer, chat, self.options.seq_len)
                with closing(router):
                    tokenise(self.source, self.tokenizer, router, progress, self.dtype, chosen, num_workers)
                    state = router.finish()
        try:
            _check_sizes(writers, self.source, self.options, state.left_out)
        except DataError:
            self.work.begin_anew()  # resuming would fail in the same way
            raise
        splits = _finish(writers, self.work.set_folder, self._token_bytes())
        facts = None
        if chat is not None:
            num_targets = {split: writers[split].num_targets for split in splits}
            facts = ChatFacts(
                chat.template.source,
                chat.train_on,
                chat.packs,
                num_targets,
                dict(state.left_out),
                entropy_of_targets=True,
            )
        mark = state.mark
        manifest = self._write_manifest(mark, splits, facts)
        return Prepared(manifest, reused=False, note=state.note, num_rejected=mark.num_rejected, num_cut=mark.num_cut)

    def _token_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of text that each token is, [vocab_size]; 0 for those around documents."""
        lengths = bytes_of_tokens(self.tokenizer)
        lengths[[self.tokenizer.eot_token, *self.tokenizer.bos_tokens]] = 0
        return lengths

    def _open_writer(self, split: str, state: ResumeState | None) -> SplitWriter:
        options = self.options
        has_marks = self.options.chat is not None
        files = ShardFiles(
            self.work.set_folder / split,
            self.work.path / f"{split}.shards.jsonl",
            seq_len=options.seq_len,
            dtype=self.dtype,
            shard_bytes=options.shard_bytes,
            compression=options.compression,
            keep=self.destination.keep_shard,
            has_mask=has_marks,
        )
        return SplitWriter(
            files,
            self.work.path / f"{split}.windows",
            self._build_packing,
            seq_len=options.seq_len,
            vocab_size=self.tokenizer.vocab_size,
            dtype="uint32" if has_marks else self.dtype,
            # Validation takes evenly spaced samples, which cover a text that is in order.
            shuffle_seed=options.seed if options.shuffle and split == "train" else None,
            state=state.splits[split] if state else None,
            counts_targets=has_marks or split == "val",
            has_marks=has_marks,
        )

    def _build_packing(self, state: PackingState) -> Packing:
        options = self.options
        eot_token = self.tokenizer.eot_token
        if options.chat is not None:
            return ConversationPacking(options.seq_len, eot_token, state, alone=not options.chat.packs)
        if options.packing == "stream":
            return StreamPacking(options.seq_len, state)
        return BestFitPacking(options.seq_len, self.dtype, eot_token, state)

    def _write_manifest(self, mark: ReadPosition, splits: dict[str, SplitManifest], chat: ChatFacts | None) -> Manifest:
        """Write the tokenizer's files and the manifest. `mark` is the position after the last record."""
        tokenizer = self.tokenizer
        folder = self.work.set_folder
        manifest = Manifest(
            tokenizer=tokenizer.spec,
            tokenizer_files=_save_tokenizer(tokenizer, folder),
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eot_token=tokenizer.eot_token,
            seq_len=self.options.seq_len,
            dtype=self.dtype,
            hash_algorithm=HASH_ALGORITHM,
            compression=self.options.compression,
            source=self.source.name,
            request=self.request,
            skipped_documents=mark.num_skipped + mark.num_rejected,
            empty_documents=mark.num_empty,
            splits=splits,
            counts_own_bytes=True,
            chat=chat,
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        return manifest


def _finish(writers: dict[str, SplitWriter], folder: Path, token_bytes: NDArray[np.int64]) -> dict[str, SplitManifest]:
    """Write the shards of every split; a val split without documents is removed."""
    total_bytes = sum(writer.num_window_bytes for writer in writers.values())
    with show_progress("Writing shards", total_bytes) as progress:
        splits = {split: writer.finish(progress.add, token_bytes) for split, writer in writers.items()}
    if not splits["val"].num_documents:
        del splits["val"]
        shutil.rmtree(folder / "val")
    return splits


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Copy the tokenizer into the dataset and return its relative path, empty if it needs no files."""
    shutil.rmtree(folder / TOKENIZER_FOLDER, ignore_errors=True)
    (folder / TOKENIZER_FOLDER).mkdir()
    saved = tokenizer.save(folder / TOKENIZER_FOLDER)
    if not saved:
        (folder / TOKENIZER_FOLDER).rmdir()
    return f"{TOKENIZER_FOLDER}/{saved}" if saved else ""


def describe_left_out(left_out: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each reason for which conversations were left out."""
    for reason, count in sorted(left_out.items(), key=lambda item: -item[1]):
        if reason == TOO_LONG:
            remedy = " (--seq-len gives longer rows, --truncate cuts them)"
        else:
            remedy = ""
        yield f"Left out {count_nouns(count, 'conversation')} {reason}{remedy}."


def _check_sizes(
    writers: dict[str, SplitWriter], source: Source, options: PrepareOptions, left_out: Mapping[str, int]
) -> None:
    """Check before shards are written that every split holds a window. Raises DataError."""
    if left_out and not any(writer.num_documents for writer in writers.values()):
        reasons = " ".join(describe_left_out(left_out))
        raise DataError(f"--input {source.name} has no conversation to train on. {reasons}")
    made = {split: writer for split, writer in writers.items() if writer.num_documents or split == "train"}
    if not any(writer.num_documents for writer in made.values()):
        raise DataError(f"--input {source.name} has no text: it holds no documents, or all are empty or left out.")
    for split, writer in made.items():
        if writer.num_windows:
            continue
        remedy = "lower --seq-len or give more text"
        if split == "val":
            remedy = "raise --val-fraction, lower --seq-len, or use none with --val-fraction 0"
        elif "val" in made:
            remedy += f" (val took {made['val'].num_documents} documents: --val-fraction 0 leaves them in train)"
        raise DataError(
            f"{source.name}: the {split} split holds {writer.num_tokens} tokens in {writer.num_documents} documents, "
            f"less than one window of {options.seq_len + 1}: {remedy}."
        )
