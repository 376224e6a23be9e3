"""Tokenise a source's documents in worker threads, assign them to splits, and save a state to resume from."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.order.permutation import fold64, key64
from llmscale.data.prepare import split_writer
from llmscale.data.prepare.chat import ChatEncoder
from llmscale.data.prepare.encoder import Encoder, EncoderName, choose_encoder
from llmscale.data.prepare.output_folder import RejectedRecords, WorkFolder
from llmscale.data.prepare.packing import PackingState, Tokens
from llmscale.data.prepare.sources.source import Place, Rejected, Source, TokenRules
from llmscale.data.prepare.split_writer import SplitState, SplitWriter
from llmscale.data.shards.manifest import TokenDtype
from llmscale.data.shards.token_shards import ids_of
from llmscale.data.tokenizers.tokenizer import TokenArray, Tokenizer, letters_of_bytes
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress

#: Characters per batch.
BATCH_CHARACTERS = 1 << 20
#: Most records per batch, for nearly empty ones.
_MOST_RECORDS = 1 << 14
#: Reasons by which conversations left out are counted: those with a text of the data's are as many as it likes.
_MOST_REASONS = 20
#: Tokens whose bytes are looked up at a time.
_PIECE_TOKENS = 1 << 20
#: Most tokens in memory (256 MiB) while documents wait for a window of validation.
MOST_WAITING_TOKENS = 1 << 26
#: Separates hashes of tokens from those of texts.
_TOKENS_SEED = 0x70C5
#: Separates the scores from the sample order's keys at equal seeds.
_DOMAIN = 0x5B11_7C0D_E5A1_D09E
_T = TypeVar("_T")
_R = TypeVar("_R")
#: Batches in flight per worker, enough to keep it busy while others read and write.
READ_AHEAD = 3
#: Most work that an interruption loses, once no document waits for validation.
CHECKPOINT_INTERVAL_S = 30.0


@dataclass(frozen=True)
class ResumeState:
    """State of the work at a moment when all documents read so far are in their splits."""

    mark: ReadPosition
    """Position in the source."""
    rejected: tuple[int, int]
    """Bytes and records in the file of rejected records."""
    splits: dict[str, SplitState]
    note: str = ""
    """How validation was split off."""
    is_read: bool = False
    """True if all documents are in the splits and only shards are missing."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Conversations that were left out, by reason."""

    @property
    def num_documents(self) -> int:
        return sum(split.num_documents for split in self.splits.values())


def load_resume_state(work: WorkFolder) -> ResumeState | None:
    """Return the saved state, or None. Raises OSError."""
    saved = work.load_state()
    if saved is None:
        return None
    mark = saved.pop("mark")
    splits = saved.pop("splits")
    return ResumeState(
        mark=ReadPosition(**{**mark, "place": tuple(mark["place"])}),
        splits={
            name: SplitState(**{**split, "packing": PackingState(**split["packing"])}) for name, split in splits.items()
        },
        **saved,
    )


@dataclass(frozen=True)
class ReadPosition:
    """Reader position after a record, with counts of empty, rejected, cut and skipped records."""

    place: Place = ()
    read_bytes: int = 0
    num_empty: int = 0
    num_rejected: int = 0
    num_cut: int = 0
    num_skipped: int = 0
    is_end: bool = False


@dataclass
class Batch:
    """Consecutive documents."""

    documents: list[str | TokenArray] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    mark: ReadPosition = ReadPosition()
    """Position after the last of them."""
    size: int = 0
    """Characters, tokens, and bytes of rejected records."""

    @property
    def weight(self) -> int:
        """Number of usual batches that this one counts for: a document of many MB counts for many."""
        return max(1, self.size // BATCH_CHARACTERS)


def gather(source: Source, rules: TokenRules | None, mark: ReadPosition) -> Generator[Batch]:
    """Yield the documents of a source after `mark` in batches; empty ones are counted. Tokens need `rules`."""
    if mark.is_end:
        return
    batch = Batch()
    num_records = 0
    place = mark.place
    num_empty = mark.num_empty
    num_rejected = mark.num_rejected
    source.num_cut = mark.num_cut
    source.skipped = mark.num_skipped

    def position(*, is_end: bool) -> ReadPosition:
        counts = num_empty, num_rejected, source.num_cut, source.skipped
        return ReadPosition(place, source.read_bytes, *counts, is_end)

    for record in source.records(mark.place, rules):
        place = record.place
        num_records += 1
        if isinstance(record, Rejected):
            batch.rejected.append(record)
            num_rejected += 1
            batch.size += len(record.contents)
        elif len(record.content):
            batch.documents.append(record.content)
            batch.size += len(record.content)
        else:
            num_empty += 1
        if batch.size >= BATCH_CHARACTERS or num_records == _MOST_RECORDS:
            batch.mark = position(is_end=False)
            yield batch
            batch = Batch()
            num_records = 0
    batch.mark = position(is_end=True)
    yield batch


@dataclass(frozen=True)
class TokenisedDocument:
    """A document's tokens, with begin-of-text and end-of-text."""

    tokens: Tokens
    num_text_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenisedBatch:
    """A tokenised batch: concatenated documents, each with begin-of-text and end-of-text."""

    tokens: Tokens
    """Tokens of all documents, [n]."""
    begins: Sequence[int]
    """Offset of each document in `tokens`, and the end of the last."""
    num_text_bytes: Sequence[int]
    """UTF-8 bytes of each document."""
    text_hashes: Sequence[bytes]
    """Hash of each document, equal for copies."""
    rejected: list[Rejected]
    mark: ReadPosition
    """Position after the batch."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Conversations that were left out, by reason."""

    def tokens_of(self, first: int, end: int) -> Tokens:
        """Return the tokens of documents first .. end - 1. A small part is copied, so that the rest can be freed."""
        part = self.tokens[self.begins[first] : self.begins[end]]
        if 2 * len(part) > len(self.tokens):
            return part
        return part.copy()

    def document(self, number: int) -> TokenisedDocument:
        return TokenisedDocument(self.tokens_of(number, number + 1), self.num_text_bytes[number])


class BatchTokeniser:
    """Tokenises batches; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, encoder: Encoder | ChatEncoder, dtype: TokenDtype) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._dtype = np.dtype(dtype)
        self._before = np.array(tokenizer.bos_tokens, self._dtype)

    def __call__(self, batch: Batch) -> TokenisedBatch:
        if isinstance(self._encoder, ChatEncoder):
            return self._render(batch, self._encoder)
        texts = [document for document in batch.documents if isinstance(document, str)]
        encoded = iter(self._encoder.encode(texts))
        parts = []
        num_text_bytes = []
        hashes = []
        for document in batch.documents:
            if isinstance(document, str):
                parts.append(next(encoded))
                num_text_bytes.append(len(document) if document.isascii() else len(document.encode()))
                hashes.append(hash_text(document))
            else:
                parts.append(document)
                num_text_bytes.append(int(self._token_bytes[document].sum()))
                hashes.append(hash_tokens(document))
        tokens, begins = self._join(parts)
        return TokenisedBatch(tokens, begins, num_text_bytes, hashes, batch.rejected, batch.mark)

    def _render(self, batch: Batch, encoder: ChatEncoder) -> TokenisedBatch:
        """Tokenise conversations, which have no other ends than those of the template."""
        left_out: Counter[str] = Counter()
        rejected = list(batch.rejected)
        parts = [np.zeros(0, np.uint32)]
        hashes = []
        documents = [document for document in batch.documents if isinstance(document, str)]
        if len(documents) < len(batch.documents):
            raise DataError("--chat reads conversations, and --input holds tokens. Leave out --chat for tokens.")
        for document, encoded in zip(documents, encoder.encode_conversations(documents), strict=True):
            if encoded.refusal:
                left_out[encoded.refusal] += 1
            else:
                parts.append(encoded.tokens)
                hashes.append(hash_text(document.partition("\n")[0]))
            if encoded.dropped:
                where = f"the conversation {document[:60]!r}"
                rejected.append(Rejected(where, encoded.dropped, document.encode()))
        num_text_bytes = [int(self._token_bytes[ids_of(part)].sum()) for part in parts[1:]]
        begins = [*itertools.accumulate(map(len, parts))]
        return TokenisedBatch(np.concatenate(parts), begins, num_text_bytes, hashes, rejected, batch.mark, left_out)

    def _join(self, parts: Sequence[TokenArray]) -> tuple[Tokens, list[int]]:
        """Concatenate documents with begin-of-text and end-of-text, and return their offsets."""
        num_before = len(self._before)
        begins = [0, *itertools.accumulate(num_before + len(part) + 1 for part in parts)]
        tokens: Tokens = np.empty(begins[-1], self._dtype)
        for part, begin in zip(parts, begins, strict=False):
            tokens[begin + num_before : begin + num_before + len(part)] = part
        edges = np.array(begins)
        tokens[edges[1:] - 1] = self._tokenizer.eot_token
        for number, token in enumerate(self._before):
            tokens[edges[:-1] + number] = token
        return tokens, begins

    @functools.cached_property
    def _token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each token, [vocab_size]; approximate unless the tokenizer is byte-level."""
        return bytes_of_tokens(self._tokenizer)


def bytes_of_tokens(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the UTF-8 bytes of each token, [vocab_size]; a byte-level token has one per character."""
    letters = set(letters_of_bytes().values())
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for token, text in tokenizer.tokens().items():
        lengths[token] = len(text) if letters.issuperset(text) else len(text.encode())
    return lengths


def cut_document(
    document: TokenisedDocument, num_tokens: int, tokenizer: Tokenizer
) -> tuple[TokenisedDocument, TokenisedDocument]:
    """Return the first `num_tokens` tokens and the rest as two documents, each with end-of-text and its own bytes."""
    tokens = document.tokens
    lengths = bytes_of_tokens(tokenizer)

    def count(part: Tokens) -> int:
        pieces = (part[first : first + _PIECE_TOKENS] for first in range(0, len(part), _PIECE_TOKENS))
        return sum(int(lengths[piece].sum()) for piece in pieces)

    num_bytes = count(tokens[len(tokenizer.bos_tokens) : num_tokens])
    rest = tokens[num_tokens:-1]
    if num_bytes + count(rest) != document.num_text_bytes:
        # A normalised text, or tokens that are not byte-level: the shorter part is decoded.
        num_bytes = max(0, document.num_text_bytes - len(tokenizer.decode(rest.tolist()).encode()))
    return (
        TokenisedDocument(np.append(tokens[:num_tokens], tokens[-1:]), num_bytes),
        TokenisedDocument(tokens[num_tokens:], document.num_text_bytes - num_bytes),
    )


def hash_text(text: str) -> bytes:
    """Return a 128-bit hash of a document's text."""
    return xxhash.xxh3_128_digest(text.encode())


def hash_tokens(tokens: TokenArray) -> bytes:
    """Return a 128-bit hash of a document given as tokens."""
    return xxhash.xxh3_128_digest(tokens.astype("<u4").data, seed=_TOKENS_SEED)


def split_scores(text_hashes: Sequence[bytes], seed: int) -> NDArray[np.float64]:
    """Return each document's score, uniform in [0, 1); below val_fraction means val."""
    first_words = np.frombuffer(b"".join(text_hashes), "<u8")[::2]
    # 53 bits, the precision of a float, so that a score is never 1.
    return (fold64(key64(seed, _DOMAIN), first_words) >> np.uint64(11)) / 2.0**53


class SplitAssigner:
    """Assigns documents to train or val by a hash of their text and the seed, so that copies stay together, both hold a
    window, and val is not most of the text.

    Documents wait until their scores achieve that. If they never do, or too many wait, val gets the last `val_fraction`
    of those that wait, at least one window, and the document at the border is cut. A text of less than two windows is
    left alone.
    """

    def __init__(
        self,
        val_fraction: float,
        window: int,
        cut: Callable[[TokenisedDocument, int], tuple[TokenisedDocument, TokenisedDocument]] | None,
        *,
        keeps_order: bool = False,
    ) -> None:
        """`cut` returns the first tokens of a document, as many as it is given, and the rest as two documents; None
        where documents stay complete.

        With `keeps_order` a split's documents stay in the order of the text.
        """
        self._val_fraction = val_fraction
        self._window = window
        self._cut = cut
        self._keeps_order = keeps_order
        self._waiting: list[tuple[float, TokenisedDocument]] = []
        self._num_tokens = {"train": 0, "val": 0}
        self.is_settled = val_fraction == 0
        """True once scores alone decide, and no document waits."""
        self.note = ""
        """Description of the division, if scores did not decide."""

    def is_val(self, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which documents go to val, once settled."""
        return scores < self._val_fraction

    def add(self, score: float, document: TokenisedDocument) -> Sequence[tuple[str, TokenisedDocument]]:
        """Return the documents that need not wait any longer, with their splits."""
        self._waiting.append((score, document))
        self._num_tokens[self._split(score)] += document.num_tokens
        train = self._num_tokens["train"]
        val = self._num_tokens["val"]
        if min(train, val) >= self._window and val <= max(0.5, 2 * self._val_fraction) * (train + val):
            self.is_settled = True
            return self._by_score()
        if train + val > MOST_WAITING_TOKENS:
            return self._divide("the text's first")
        return []

    def finish(self) -> Sequence[tuple[str, TokenisedDocument]]:
        """Return the documents that still wait."""
        if self.is_settled:
            return []
        return self._divide("the text's")

    def _split(self, score: float) -> str:
        return "val" if score < self._val_fraction else "train"

    def _by_score(self) -> list[tuple[str, TokenisedDocument]]:
        """Return the documents that wait, by score.

        Unless order is kept, a document with the lowest score so far comes last of those before the next such one, so
        that a dataset is the one that version 0.1.0 prepares.
        """
        before: list[tuple[float, TokenisedDocument]] = []
        lowest: list[tuple[float, TokenisedDocument]] = []
        place = 0
        while not self._keeps_order and place < len(self._waiting) and self._waiting[place][0] >= self._val_fraction:
            scored = self._waiting[place]
            if not lowest or scored[0] < lowest[0][0]:
                before = before + lowest
                lowest = [scored]
            elif scored[0] == lowest[0][0]:
                lowest.append(scored)
            else:
                before.append(scored)
            place += 1
        ordered = before + lowest + self._waiting[place:]
        return [(self._split(score), document) for score, document in ordered]

    def _divide(self, of_what: str) -> list[tuple[str, TokenisedDocument]]:
        """Assign the last of the documents that wait to val."""
        self.is_settled = True
        num_tokens = sum(self._num_tokens.values())
        num_val = max(round(num_tokens * self._val_fraction), self._window)
        # Both parts of a cut document end with an end-of-text token.
        num_train = left = num_tokens - num_val
        if num_train + 1 < self._window:
            return self._by_score()
        divided: list[tuple[str, TokenisedDocument]] = []
        for _, document in self._waiting:
            if self._cut is not None and 0 < left < document.num_tokens:
                divided += zip(("train", "val"), self._cut(document, left), strict=True)
            else:
                divided.append(("train" if left > 0 else "val", document))
            left -= document.num_tokens
        self.note = (
            f"Validation is the last {num_val:,} of {of_what} {num_tokens:,} tokens: it has too few documents to "
            "choose whole ones by --val-fraction and --seed."
        )
        return divided


def ordered_parallel_map(
    batches: Iterable[_T], work: Callable[[_T], _R], num_workers: int, *, weigh: Callable[[_T], int] = lambda _: 1
) -> Generator[_R, None, None]:
    """Yield work(batch) for every batch in order, computed by `num_workers` threads.

    `weigh` returns how many usual batches one counts for in memory. A thread consumes `batches`, and closes a generator
    at the end. Exceptions of both are raised here, in order.
    """
    num_places = (num_workers + 1) * READ_AHEAD
    places = threading.Semaphore(num_places)
    results: queue.Queue[tuple[Future[_R], int] | None] = queue.Queue()
    is_over = threading.Event()
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="encode")

    def read() -> None:
        failed: Future[_R] = Future()
        try:
            for batch in batches:
                weight = min(weigh(batch), num_places)
                for _ in range(weight):
                    places.acquire()
                if is_over.is_set():
                    return
                results.put((pool.submit(work, batch), weight))
            results.put(None)
        except BaseException as error:
            failed.set_exception(error)
            results.put((failed, 0))
        finally:
            # A waiting result may reference it, which would keep its files open.
            if isinstance(batches, Generator):
                batches.close()

    reader = threading.Thread(target=read, name="read", daemon=True)
    reader.start()
    try:
        while (entry := results.get()) is not None:
            result, weight = entry
            del entry
            yield result.result()
            del result
            places.release(weight)
    finally:
        is_over.set()
        places.release(num_places)
        pool.shutdown(wait=False, cancel_futures=True)


class SplitRouter:
    """Routes documents to the writers of their splits, and saves state to resume from."""

    def __init__(
        self,
        writers: Mapping[str, SplitWriter],
        work: WorkFolder,
        rejected: RejectedRecords,
        tokenizer: Tokenizer,
        state: ResumeState | None,
        *,
        val_fraction: float,
        window: int,
        seed: int,
        keeps_order: bool,
        is_always_kept: bool,
        cuts_documents: bool,
    ) -> None:
        """`window` is a window's number of tokens. `state` is from an interrupted run.

        With `keeps_order` documents of a split stay in the order of the text. With `is_always_kept` the final state is
        saved even after a short run.
        """
        self._writers = writers
        self._work = work
        self._rejected = rejected
        self._seed = seed
        if cuts_documents:
            cut = functools.partial(cut_document, tokenizer=tokenizer)
        else:
            cut = None
        self._assigner = SplitAssigner(val_fraction, window, cut, keeps_order=keeps_order)
        self.mark = ReadPosition()
        self._left_out = Counter[str]()
        if state is not None:
            self._assigner.is_settled = True
            self._assigner.note = state.note
            self.mark = state.mark
            self._left_out = Counter(state.left_out)
        self._has_runs = is_always_kept or state is not None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._under_way: tuple[Future[None], ResumeState] | None = None
        self._kept_s = time.monotonic()

    def add(self, batch: TokenisedBatch) -> None:
        """Route a batch. Raises OSError, DataError for too many rejected records."""
        scores = split_scores(batch.text_hashes, self._seed)
        number = 0
        while number < len(scores) and not self._assigner.is_settled:
            self._write(self._assigner.add(float(scores[number]), batch.document(number)))
            number += 1
        self._write_at_once(batch, self._assigner.is_val(scores), number)
        self.mark = batch.mark
        for reason, count in batch.left_out.items():
            is_listed = reason in self._left_out or len(self._left_out) < _MOST_REASONS
            self._left_out[reason if is_listed else "for other reasons"] += count
        self._rejected.add(batch.rejected)
        self._keep_now_and_then()

    def _write(self, assigned: Iterable[tuple[str, TokenisedDocument]]) -> None:
        for split, document in assigned:
            self._writers[split].add_documents(document.tokens, 1, document.num_text_bytes)

    def _write_at_once(self, batch: TokenisedBatch, is_val: NDArray[np.bool_], first: int) -> None:
        """Write the documents from `first` on, neighbours of one split together."""
        if first == len(is_val):
            return
        changes = np.flatnonzero(is_val[first + 1 :] != is_val[first:-1]) + first + 1
        for begin, end in pairwise([first, *changes.tolist(), len(is_val)]):
            self._writers["val" if is_val[begin] else "train"].add_documents(
                batch.tokens_of(begin, end), end - begin, sum(batch.num_text_bytes[begin:end])
            )

    def finish(self) -> ResumeState:
        """Write the documents that wait after the last batch, end all splits, and return the state. Raises OSError."""
        self._write(self._assigner.finish())
        for writer in self._writers.values():
            writer.end_text()
        if self._has_runs:
            self._keep(is_read=True)
            self._wait()
        return self._state({}, is_read=True)

    def close(self) -> None:
        """Stop the writer thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _keep_now_and_then(self) -> None:
        if self._under_way is not None and self._under_way[0].done():
            self._wait()
        is_full = sum(w.waiting_bytes for w in self._writers.values()) >= split_writer.BUFFER_BYTES
        is_time = time.monotonic() - self._kept_s >= CHECKPOINT_INTERVAL_S and self._under_way is None
        if self._assigner.is_settled and (is_full or is_time):
            self._keep(is_read=False)

    def _keep(self, *, is_read: bool) -> None:
        """Start writing the windows in memory, after which the current state is saved."""
        self._wait()
        self._has_runs = True
        self._kept_s = time.monotonic()
        taken = {name: writer.take_run() for name, writer in self._writers.items()}

        def write() -> None:
            for name, (run, _) in taken.items():
                self._writers[name].write_run(run)

        state = self._state({name: split for name, (_, split) in taken.items()}, is_read=is_read)
        self._under_way = self._pool.submit(write), state

    def _state(self, splits: dict[str, SplitState], *, is_read: bool) -> ResumeState:
        rejected = self._rejected.size_bytes, self._rejected.num_records
        return ResumeState(self.mark, rejected, splits, self._assigner.note, is_read, dict(self._left_out))

    def _wait(self) -> None:
        """Wait for the write in progress, then save its state."""
        if self._under_way is not None:
            (done, state), self._under_way = self._under_way, None
            done.result()
            self._work.save_state(asdict(state))


def tokenise(
    source: Source,
    tokenizer: Tokenizer,
    router: SplitRouter,
    progress: Progress,
    dtype: TokenDtype,
    encoder: EncoderName | ChatEncoder,
    num_workers: int,
) -> None:
    """Tokenise and route all documents of a source that are not in their splits yet. Raises DataError, OSError."""
    rules = TokenRules(tokenizer.vocab_size, tokenizer.eot_token, tokenizer.bos_tokens)
    batches = gather(source, rules, router.mark)
    first = next(batches, None)
    if first is None:
        return
    texts = [document for document in first.documents if isinstance(document, str)]
    chosen, why_slow = (encoder, "") if isinstance(encoder, ChatEncoder) else choose_encoder(tokenizer, encoder, texts)
    if why_slow:
        progress.say(why_slow)
    num_text_bytes = num_tokens = 0
    work = BatchTokeniser(tokenizer, chosen, dtype)
    all_batches = _chain(first, batches)
    with closing(ordered_parallel_map(all_batches, work, num_workers, weigh=lambda batch: batch.weight)) as tokenised:
        for batch in tokenised:
            router.add(batch)
            num_text_bytes += sum(batch.num_text_bytes)
            num_tokens += len(batch.tokens)
            progress.show(
                num_text_bytes, batch.mark.read_bytes, source.total_bytes, f"{num_tokens / 1e6:,.1f} M tokens"
            )


def _chain(first: Batch, rest: Generator[Batch]) -> Generator[Batch]:
    """Yield `first`, then the rest, which is closed together with this generator."""
    with closing(rest):
        yield first
        yield from rest
