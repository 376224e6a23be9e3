"""Batches in order, and no more of them in memory than agreed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from llmscale.data.prepare.tokenise import READ_AHEAD, ordered_parallel_map
from tests.conftest import HANG_S


@pytest.mark.parametrize(("weight", "most"), [(1, 2 * READ_AHEAD), (2, READ_AHEAD), (100, 1)])
def test_large_batches_do_not_pile_up(weight: int, most: int) -> None:
    """One more is read, and waits for its place."""
    read: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(20):
            read.append(number)
            yield number

    done = []
    for result in ordered_parallel_map(batches(), str, 1, weigh=lambda _: weight):
        time.sleep(0.005)
        assert len(read) <= len(done) + most + 1
        done.append(result)
    assert done == [str(number) for number in range(20)]


def test_what_reading_and_working_raise_is_raised_in_its_place() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    results = ordered_parallel_map(batches(), lambda number: 10 // number, 2, weigh=lambda _: 50)
    assert next(results) == 10
    with pytest.raises(OSError, match="gone"):
        next(results)
    with pytest.raises(ZeroDivisionError):
        next(ordered_parallel_map([0], lambda number: 10 // number, 2))


def test_what_is_read_from_is_closed_when_nothing_more_is_wanted() -> None:
    is_closed = threading.Event()

    def batches() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            is_closed.set()

    held = batches()
    results = ordered_parallel_map(held, str, 1)
    assert next(results) == "0"
    results.close()
    assert is_closed.wait(HANG_S)
