from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmscale.data.set_statistics import choose_windows, document_lengths, draw_lengths, read_statistics

EOT = 9


class Windows:
    """What a reader gives, from memory."""

    def __init__(self, windows: NDArray[np.uint16]) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        return self._windows[sample_ids]


def cut(stream: list[int], seq_len: int) -> Windows:
    """Windows as `prepare` cuts them: neighbours share a token."""
    starts = range(0, len(stream) - seq_len, seq_len)
    return Windows(np.array([stream[start : start + seq_len + 1] for start in starts], np.uint16))


def test_lengths_of_documents_that_lie_across_windows() -> None:
    lengths = [3, 17, 1, 40, 8]
    stream = [token for length in lengths for token in [*([1] * (length - 1)), EOT]]
    counted = document_lengths(cut(stream + [1] * 30, 8), 100, EOT)
    assert counted.tolist() == lengths[1:], "where the first one began is not known"


def test_copies_and_replacement_characters() -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(4, 10) + 65
    windows = Windows(np.concatenate([rows, rows[:1], rows[:1], rows[2:3]]))
    decode = lambda tokens: "".join(map(chr, tokens)).replace("J", "\ufffd")  # noqa: E731
    statistics = read_statistics(windows, np.arange(7), decode)
    assert (statistics.num_windows, statistics.num_copies, statistics.most_copied) == (7, 3, (0, 2))
    assert statistics.num_undecodable == 0, "where a window is cut, a character may be"
    inside = read_statistics(windows, np.arange(7), lambda tokens: decode(tokens).replace("F", "\ufffd"))
    assert inside.num_undecodable == 3


def test_few_shards_are_read_however_many_there_are() -> None:
    sizes = np.array([100, 3, 50] * 200)
    ids = choose_windows(sizes, 400)
    shards = np.searchsorted(np.cumsum(sizes), ids, side="right")
    assert len(set(shards.tolist())) == 8
    assert (shards[0], shards[-1]) == (0, len(sizes) - 1)
    assert 100 < len(ids) <= 400
    assert choose_windows(np.array([5]), 100).tolist() == [0, 1, 2, 3, 4]


def test_a_picture_has_every_document() -> None:
    lines = draw_lengths(np.array([1, 2, 3, 900, 1000]))
    assert sum(int(line.split()[-1]) for line in lines[:-1]) == 5
    assert "longest 1,000" in lines[-1]
    assert draw_lengths(np.empty(0, np.int64)) == []
