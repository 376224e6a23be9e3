"""Prepare the text of `--text` once into a cache, and find it there again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from llmscale.config.resolve import LEAST_VOCAB, MOST_VOCAB
from llmscale.data.prepare.sources.file_source import STDIN, FileSource
from llmscale.data.prepare.sources.open_source import check_apart, check_data_sets, open_source
from llmscale.data.prepare.sources.source import LocalFile, Source, describe_passed_over, opened
from llmscale.data.shards.manifest import MANIFEST_NAME
from llmscale.data.tokenizers.hugging_face import load_huggingface
from llmscale.data.tokenizers.load_tokenizer import CHARACTERS, load_tokenizer
from llmscale.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from llmscale.errors import DataError, write_failure
from llmscale.files.atomic_write import write_durably
from llmscale.terminal.progress import show_progress
from llmscale.terminal.status_line import SOON_S
from llmscale.untrusted.paths import in_home
from llmscale.untrusted.terminal import print_visible

DEFAULT_CACHE = Path("~/.cache/llmscale")
#: Incremented when the same text and settings give another dataset.
_VERSION = 2
_KEY = re.compile(r"[0-9a-f]{24}")
_CHUNK_BYTES = 1 << 20
#: Bytes of text per token of a vocabulary trained on it. A text too small for the least vocabulary is read as bytes.
_BYTES_PER_ENTRY = 2048
#: Characters at the beginning of a text that its vocabulary is trained on.
_TRAINED_ON = 64 << 20


@dataclass(frozen=True)
class TextRequest:
    """A text, and how a run needs it."""

    text: str
    """Text, as `data prepare --input` names it."""
    tokenizer: str | None
    """Tokenizer, as `data prepare --tokenizer` names it; None for one trained on the text."""
    seq_len: int
    cache: Path
    """Folder of caches."""
    skip_undecodable: bool = False
    """Skip and count texts that are not UTF-8."""
    most_vocab: int = MOST_VOCAB
    """Largest vocabulary that is trained, a power of two."""

    def open(self, *, may_prepare: bool) -> Path:
        """Return the folder of the prepared text. One process prepares it, others on the same cache wait for that one.

        A dataset is named after the contents of all files, the tokenizer and seq_len. A note, named after the paths,
        sizes and times of the files, leads to it, so that a later start reads no text. Raises DataError, also for a
        text that is not prepared yet, unless this process `may_prepare`.
        """
        try:
            if self.text == STDIN:
                raise DataError("stdin can be read only once, and every rank would read it.")
            return self._open(in_home(self.cache) / "text", may_prepare)
        except DataError as error:
            remedy = "`llmscale data prepare` has the flags for reading text; train on its --out with --data."
            raise DataError(f"{error} ({remedy} --text is {self.text!r}.)") from error
        except OSError as error:
            raise DataError(
                f"{write_failure(error, self.cache)} --text {self.text} is prepared there: name a folder with space "
                "and permission with --data-cache."
            ) from None

    def _open(self, cache: Path, may_prepare: bool) -> Path:
        check_apart([self.text], cache)
        source = open_source(self.text, skip_undecodable=self.skip_undecodable)
        vocabulary = (self.tokenizer or self._vocab_size(source), self._tokenizer_files())
        note = cache / "known" / _hash(source.fingerprint(), *vocabulary, self.seq_len)
        if (folder := _follow(note)) is None:
            if not may_prepare:
                raise DataError("it is not prepared on this host yet; the first start does that.")
            note.parent.mkdir(parents=True, exist_ok=True)
            with _acquire(note):
                if (folder := _follow(note)) is None:
                    folder = self._prepare(source, cache)
                    write_durably(note, folder.name)
        return folder

    def _prepare(self, source: Source, cache: Path) -> Path:
        """Prepare a text that no note leads to, unless a copy of it was prepared."""
        from llmscale.data.prepare.prepare_set import PrepareOptions, describe_reading, prepare  # slow to import

        check_data_sets([self.text])
        source.check()
        if self.tokenizer not in (None, CHARACTERS):
            given = load_tokenizer(self.tokenizer)
        else:
            given = None
        vocab_size = self._vocab_size(source)
        vocabulary = given.sha256 if given else self.tokenizer or vocab_size
        folder = cache / _hash(_hash_contents(source), vocabulary, self.seq_len, self.skip_undecodable)
        if (folder / MANIFEST_NAME).is_file():
            return folder
        _announce(
            f"preparing {source.name} once: tokenizer {self.tokenizer or self._describe_vocabulary(vocab_size)}, "
            f"seq_len {self.seq_len}"
        )
        passed_over = set(source.passed_over)
        for line in describe_passed_over(passed_over):
            _announce(line)
        start_s = time.monotonic()
        tokenizer = given or self._train(source, vocab_size, folder.with_name(f"{folder.name}-tokenizer"))
        prepared = prepare(source, folder, tokenizer, PrepareOptions(seq_len=self.seq_len))
        counts = [f"{split.num_tokens:,} tokens to {name}" for name, split in prepared.manifest.splits.items()]
        _announce(f"prepared {', '.join(counts)}, of {tokenizer.vocab_size:,}, in {time.monotonic() - start_s:.1f} s")
        reading = describe_reading(source.passed_over - passed_over, folder, prepared.num_rejected, prepared.num_cut)
        for line in filter(None, (*reading, prepared.note)):
            _announce(line)
        return folder

    def _vocab_size(self, source: Source) -> int | None:
        """Return the size of a vocabulary for a text; None for one that is read as bytes."""
        num_entries = (source.total_bytes or sys.maxsize) // _BYTES_PER_ENTRY
        if num_entries >= LEAST_VOCAB:
            return min(self.most_vocab, 1 << num_entries.bit_length() - 1)
        return None

    def _describe_vocabulary(self, vocab_size: int | None) -> str:
        if vocab_size is None:
            return "bytes, for so little text"
        is_limited = vocab_size == self.most_vocab < MOST_VOCAB
        if is_limited:
            why = "the most for the model's size"
        else:
            why = "as many as the text suffices for"
        return f"of {vocab_size:,} tokens, {why}, trained on it"

    def _train(self, source: Source, vocab_size: int | None, folder: Path) -> Tokenizer:
        """Return a tokenizer made from the text, or the saved one."""
        # Slow to import.
        from llmscale.data.tokenizers.train_tokenizer import make_character_tokenizer, train_tokenizer

        if self.tokenizer == CHARACTERS:
            return make_character_tokenizer(source)
        if vocab_size is None:
            return ByteTokenizer()
        if folder.is_dir():
            return load_huggingface(folder)
        return train_tokenizer(source, folder, vocab_size, most_characters=_TRAINED_ON, at_most=True)

    def _tokenizer_files(self) -> list[list[object]]:
        """Return names, sizes and times of a tokenizer's own files."""
        path = Path(self.tokenizer or "-")
        if path.is_dir():
            files = sorted(path.iterdir())
        else:
            files = [path] * path.exists()
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _follow(note: Path) -> Path | None:
    """Return the dataset that a note names, if both exist."""
    try:
        key = note.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    folder = note.parents[1] / key
    return folder if _KEY.fullmatch(key) and (folder / MANIFEST_NAME).is_file() else None


def _acquire(note: Path) -> AbstractContextManager[object]:
    """Wait until no other process prepares the text; return a context that holds the lock."""
    import filelock

    lock = filelock.FileLock(note.with_suffix(".lock"))
    try:
        return lock.acquire(timeout=SOON_S)
    except filelock.Timeout:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _announce("waiting for another process, which prepares the text")
        return lock.acquire()


def _hash_contents(source: Source) -> str:
    """Return a hash of the paths and contents of local files; the fingerprint of any other source."""
    if not isinstance(source, FileSource) or not all(isinstance(file, LocalFile) for file in source.files):
        return source.fingerprint()
    entries = []
    with show_progress(f"Reading {source.name}", source.total_bytes) as progress:
        for file in source.files:
            digest = hashlib.sha256()
            with opened(file) as raw:
                while chunk := raw.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    progress.add(len(chunk))
            entries.append([file.relative, digest.hexdigest()])
    return _hash(entries)


def _hash(*values: object) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *values]).encode()).hexdigest()[:24]


def _announce(line: str) -> None:
    print_visible(line, file=sys.stderr, flush=True)
