"""Tokenise documents on all cores, in order, with bounded memory."""

from __future__ import annotations

import collections
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from llmscale.data.tokenizers.tokenizer import TokenArray, Tokenizer, cut_text
from llmscale.errors import DataError

#: Characters of a long document that are encoded as one piece, where the tokenizer allows a cut.
PIECE_CHARACTERS = 1 << 18
#: Characters that travel to a worker at once.
BATCH_CHARACTERS = 1 << 19
#: Batches under way per worker: enough to keep it busy while the parent writes.
READ_AHEAD = 3


@dataclass(frozen=True)
class Piece:
    """A document or a part of one."""

    text: str
    ends_document: bool


def pieces_of(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Documents cut where this tokenizer's tokens cannot cross; whole when there is no such place."""
    for text in texts:
        parts = [text] if not tokenizer.newline_is_a_border else list(cut_text(text, PIECE_CHARACTERS))
        for number, part in enumerate(parts, start=1):
            yield Piece(part, ends_document=number == len(parts))


def encode_in_order(
    pieces: Iterable[Piece], tokenizer: Tokenizer, num_workers: int
) -> Iterator[tuple[Piece, TokenArray]]:
    """Every piece with its tokens, in the order given: the same for any number of workers.

    Raises DataError when a worker dies.
    """
    batches = _batched(pieces)
    if num_workers <= 1:
        for batch in batches:
            yield from zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True)
        return
    # Workers are spawned, not forked: the parent may hold threads of pyarrow, datasets or tokenizers by now.
    with ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer,),
    ) as pool:
        try:
            yield from _encode_ahead(pool, batches, num_workers * READ_AHEAD)
        except BrokenProcessPool:
            raise DataError(
                "A tokenising worker was killed, most likely for lack of memory. Use fewer with --workers N."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _encode_ahead(
    pool: ProcessPoolExecutor, batches: Iterator[list[Piece]], read_ahead: int
) -> Iterator[tuple[Piece, TokenArray]]:
    under_way: collections.deque[tuple[list[Piece], Future[list[TokenArray]]]] = collections.deque()
    for batch in batches:
        under_way.append((batch, pool.submit(_encode, [piece.text for piece in batch])))
        if len(under_way) >= read_ahead:
            done, future = under_way.popleft()
            yield from zip(done, future.result(), strict=True)
    for done, future in under_way:
        yield from zip(done, future.result(), strict=True)


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Worker:
    """What a worker process keeps between batches."""

    tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.tokenizer = tokenizer
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A worker holds both ends of its queue and would wait for ever if the parent were killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _encode(texts: list[str]) -> list[TokenArray]:
    arrays = _Worker.tokenizer.encode_batch(texts)
    # Half the bytes through the pipe where the ids are small, which is nearly always.
    return [array.astype(np.uint16) if array.size and array.max() < 1 << 16 else array for array in arrays]
