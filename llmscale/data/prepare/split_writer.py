"""Pack one split's documents into windows of T + 1 tokens, shuffle them and write them as MDS shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.shard_files import Entry, ShardFiles
from llmscale.data.prepare.window_shuffle import Run, WindowShuffle
from llmscale.data.shards.manifest import HASH_ALGORITHM, ShardInfo, SplitManifest, TokenDtype

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class TokenisedDocument:
    """A document's tokens with what stands around it, end-of-text last, and what decides where it goes."""

    tokens: Tokens
    num_text_bytes: int
    text_hash: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def cut_at(self, num_tokens: int) -> tuple[TokenisedDocument, TokenisedDocument]:
        """The first tokens, and the others, each with end-of-text behind it; bytes of text in proportion."""
        num_bytes = round(self.num_text_bytes * num_tokens / (len(self.tokens) - 1))
        first = np.append(self.tokens[:num_tokens], self.tokens[-1:])
        return (
            TokenisedDocument(first, num_bytes, self.text_hash),
            TokenisedDocument(self.tokens[num_tokens:], self.num_text_bytes - num_bytes, self.text_hash),
        )


#: Tokens that are gathered before windows are cut off.
_BUFFER_TOKENS = 1 << 18


@dataclass
class SplitState:
    """What a split holds besides the windows that are on disk: enough to go on from there."""

    rest: Tokens
    """Tokens behind the last full window, the token that it shares with the next one first."""
    counts: NDArray[np.int64]
    """How often each token occurred, [vocab_size]."""
    num_documents: int
    num_text_bytes: int
    run_begins: list[int]
    """Of the windows on disk; see WindowShuffle."""


class SplitWriter:
    """Documents go in one after the other, each followed by end-of-text.

    Window w is tokens [w T, w T + T] of the resulting stream: T + 1 tokens, of which the last is the next
    window's first, so that with inputs window[:-1] and targets window[1:] every token is an input once and a
    target once. Sample k is the k-th window by the keys that `shuffle_seed` gives (window_shuffle.py), or window k
    when that is None.
    """

    def __init__(
        self,
        files: ShardFiles,
        scratch: Path,
        *,
        seq_len: int,
        vocab_size: int,
        dtype: TokenDtype,
        shuffle_seed: int | None,
        state: SplitState | None,
    ) -> None:
        """`scratch` is for windows that do not fit into memory. `state` is what an interrupted run has left."""
        self._files = files
        self._seq_len = seq_len
        state = state or SplitState(np.zeros(0, dtype), np.zeros(vocab_size, np.int64), 0, 0, [0])
        self._waiting: list[Tokens] = [state.rest]
        self._num_waiting = self._num_counted = len(state.rest)
        self._counts = state.counts
        self._num_documents, self._num_text_bytes = state.num_documents, state.num_text_bytes
        self._shuffle = WindowShuffle(
            scratch, window_length=seq_len + 1, dtype=dtype, seed=shuffle_seed, run_begins=state.run_begins
        )

    @property
    def num_documents(self) -> int:
        return self._num_documents

    @property
    def waiting_bytes(self) -> int:
        """Of windows in memory."""
        return self._shuffle.waiting_bytes

    @property
    def num_windows(self) -> int:
        """That all documents until now fill."""
        return self._shuffle.num_windows + max(0, self._num_waiting - 1) // self._seq_len

    @property
    def num_window_bytes(self) -> int:
        """Of these windows."""
        return self.num_windows * (self._seq_len + 1) * self._waiting[0].itemsize

    @property
    def num_tokens(self) -> int:
        return int(self._counts.sum()) + self._num_waiting - self._num_counted

    def add_documents(self, tokens: Tokens, num_documents: int, num_text_bytes: int) -> None:
        """Append documents' tokens, of the split's dtype, each with the end-of-text token that ends it."""
        self._waiting.append(tokens)
        self._num_waiting += len(tokens)
        self._num_documents += num_documents
        self._num_text_bytes += num_text_bytes
        if self._num_waiting >= max(_BUFFER_TOKENS, self._seq_len + 1):
            self._cut_windows()

    def take_run(self) -> tuple[Run, SplitState]:
        """The windows in memory, for `write_run`, and what the split will be once they are written."""
        self._cut_windows()
        run = self._shuffle.take_run()
        [rest] = self._waiting
        begins = list(self._shuffle.run_begins)
        return run, SplitState(rest, self._counts.copy(), self._num_documents, self._num_text_bytes, begins)

    def write_run(self, run: Run) -> None:
        """Raises OSError. May run beside `add_documents`."""
        self._shuffle.write_run(run)

    def finish(self, done: Callable[[int], None]) -> SplitManifest:
        """Write what is left, the shards and the index, and tell `done` the bytes of each shard.

        What does not fill a window is counted as the tail. Raises OSError.
        """
        self._cut_windows()
        num_samples = self._shuffle.num_windows
        entries = self._files.write(self._shuffle.drain, done)
        num_tokens = int(self._counts.sum())
        covered = num_samples * self._seq_len + 1 if num_samples else 0
        present = np.flatnonzero(self._counts)
        return SplitManifest(
            num_documents=self._num_documents,
            num_text_bytes=self._num_text_bytes,
            num_tokens=num_tokens,
            num_samples=num_samples,
            tail_tokens=num_tokens - covered,
            max_token_id=int(present[-1]) if present.size else 0,
            unigram_entropy_nats=unigram_entropy_nats(self._counts),
            shards=tuple(map(_describe, entries)),
        )

    def _cut_windows(self) -> None:
        """Count what is waiting and pass on every full window; the rest, a shared token included, stays."""
        tokens = np.concatenate(self._waiting)
        self._counts += np.bincount(tokens[self._num_counted :], minlength=len(self._counts))
        num_windows = max(0, (len(tokens) - 1) // self._seq_len)
        if num_windows:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self._seq_len + 1)[:: self._seq_len]
            self._shuffle.add(windows)
        rest = tokens[num_windows * self._seq_len :].copy()
        self._waiting, self._num_waiting, self._num_counted = [rest], len(rest), len(rest)


def _describe(entry: Entry) -> ShardInfo:
    raw, num_samples = entry["raw_data"], entry["samples"]
    assert isinstance(raw, dict) and isinstance(num_samples, int)
    return ShardInfo(raw["basename"], raw["bytes"], raw["hashes"][HASH_ALGORITHM], num_samples)


def unigram_entropy_nats(counts: NDArray[np.int64]) -> float:
    """- sum p ln p over token frequencies p: the cross-entropy, in nats, of a model that knows only these."""
    frequencies = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(frequencies * np.log(frequencies)).sum())
