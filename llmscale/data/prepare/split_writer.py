"""Pack one split's documents into windows of T + 1 tokens, shuffle them and write them as MDS shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.progress import Progress
from llmscale.data.prepare.window_shuffle import WindowShuffle
from llmscale.data.shards.manifest import ShardInfo, SplitManifest
from llmscale.data.shards.set_rules import HASH_ALGORITHM, TokenDtype
from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.tokenizers.tokenizer import TokenArray

#: Tokens that are gathered before windows are cut off.
_BUFFER_TOKENS = 1 << 18


class SplitWriter:
    """Documents go in one after the other, each followed by end-of-text.

    Window w is tokens [w T, w T + T] of the resulting stream: T + 1 tokens, of which the last is the next
    window's first, so that with inputs window[:-1] and targets window[1:] every token is an input once and a
    target once. Sample k is the k-th window by the keys that `shuffle_seed` gives (window_shuffle.py), or window k
    when that is None.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seq_len: int,
        vocab_size: int,
        dtype: TokenDtype,
        shard_bytes: int,
        compression: str,
        shuffle_seed: int | None,
    ) -> None:
        self._folder = folder
        self._seq_len = seq_len
        self._dtype = np.dtype(dtype)
        self._writer = streaming_module("format.mds").MDSWriter(
            columns={"tokens": f"ndarray:{dtype}:{seq_len + 1}"},
            out=str(folder),
            compression=compression or None,
            hashes=[HASH_ALGORITHM],
            size_limit=shard_bytes,
        )
        scratch = folder / "unshuffled.tmp"
        self._shuffle = None if shuffle_seed is None else WindowShuffle(scratch, seed=shuffle_seed)
        self._waiting: list[NDArray[np.unsignedinteger]] = []
        self._num_waiting = 0
        self._num_counted = 0
        self._counts = np.zeros(vocab_size, np.int64)
        self._num_documents = 0
        self._num_text_bytes = 0
        self._num_samples = 0

    @property
    def num_documents(self) -> int:
        return self._num_documents

    def add_document(self, parts: Sequence[TokenArray], eot_token: int, num_text_bytes: int) -> None:
        """Append a document's tokens, given in parts, and an end-of-text token."""
        for tokens in (*parts, np.array([eot_token], np.uint32)):
            self._waiting.append(tokens.astype(self._dtype))
            self._num_waiting += len(tokens)
        self._num_documents += 1
        self._num_text_bytes += num_text_bytes
        if self._num_waiting >= max(_BUFFER_TOKENS, self._seq_len + 1):
            self._write_windows()

    def finish(self, progress: Progress) -> SplitManifest:
        """Write what is left and the index, and tell `progress` the bytes of shuffled windows.

        What does not fill a window is counted as the tail.
        """
        self._write_windows()
        if self._shuffle:
            for windows in self._shuffle.drain():
                self._write(windows)
                progress.add(windows.nbytes)
        self._writer.finish()
        num_tokens = int(self._counts.sum())
        covered = self._num_samples * self._seq_len + 1 if self._num_samples else 0
        present = np.flatnonzero(self._counts)
        return SplitManifest(
            num_documents=self._num_documents,
            num_text_bytes=self._num_text_bytes,
            num_tokens=num_tokens,
            num_samples=self._num_samples,
            tail_tokens=num_tokens - covered,
            max_token_id=int(present[-1]) if present.size else 0,
            unigram_entropy_nats=unigram_entropy_nats(self._counts),
            shards=self._shards(),
        )

    def _write_windows(self) -> None:
        """Count what is waiting and pass on every full window; the rest, a shared token included, stays."""
        if not self._waiting:
            return
        tokens = np.concatenate(self._waiting)
        self._counts += np.bincount(tokens[self._num_counted :], minlength=len(self._counts))
        num_windows = (len(tokens) - 1) // self._seq_len
        if num_windows:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self._seq_len + 1)[:: self._seq_len]
            if self._shuffle:
                self._shuffle.add(windows)
            else:
                self._write(windows)
        self._num_samples += num_windows
        rest = tokens[num_windows * self._seq_len :].copy()
        self._waiting, self._num_waiting, self._num_counted = [rest], len(rest), len(rest)

    def _write(self, windows: NDArray[np.unsignedinteger]) -> None:
        for window in windows:
            self._writer.write({"tokens": window})

    def _shards(self) -> tuple[ShardInfo, ...]:
        index = json.loads((self._folder / "index.json").read_text(encoding="utf-8"))
        return tuple(
            ShardInfo(
                name=shard["raw_data"]["basename"],
                bytes=shard["raw_data"]["bytes"],
                hash=shard["raw_data"]["hashes"][HASH_ALGORITHM],
                num_samples=shard["samples"],
            )
            for shard in index["shards"]
        )


def unigram_entropy_nats(counts: NDArray[np.int64]) -> float:
    """- sum p ln p over token frequencies p: the cross-entropy, in nats, of a model that knows only these."""
    frequencies = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(frequencies * np.log(frequencies)).sum())
