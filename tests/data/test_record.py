from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.record import SampleRecorder, ids_checksum, load_recorded, next_session
from llmscale.errors import DataError


def _record(run: Path, session: int, world: int, start: int, stop: int, offset: int = 0) -> None:
    """Step s consumes ids 10 s + offset + rank, twice per rank."""
    for rank in range(world):
        recorder = SampleRecorder(run, session=session, rank=rank, world_size=world, start_step=start)
        for step in range(start, stop):
            recorder.add(np.array([10 * step + offset + rank]))
            recorder.add(np.array([10 * step + offset + world + rank]))
            recorder.end_step(step)
        recorder.close()


def test_what_was_consumed_comes_back_per_step(tmp_path: Path) -> None:
    _record(tmp_path, 0, 2, 0, 3)
    recorded = load_recorded(tmp_path)
    assert {step: ids.tolist() for step, ids in recorded.items()} == {
        s: [10 * s + i for i in range(4)] for s in range(3)
    }


def test_a_restart_supersedes_the_abandoned_steps(tmp_path: Path) -> None:
    _record(tmp_path, next_session(tmp_path), 2, 0, 5)
    _record(tmp_path, next_session(tmp_path), 1, 3, 4, offset=5)
    recorded = load_recorded(tmp_path)
    assert next_session(tmp_path) == 2
    assert list(recorded) == [0, 1, 2, 3]
    assert recorded[2].tolist() == [20, 21, 22, 23]
    assert recorded[3].tolist() == [35, 36]


@pytest.mark.parametrize("cut_bytes", [1, 8, 12, 23, 24])
def test_a_torn_tail_and_an_unfinished_step_are_left_out(tmp_path: Path, cut_bytes: int) -> None:
    """Rank 1 was killed while it wrote its last record of 24 bytes, or before."""
    _record(tmp_path, 0, 2, 0, 3)
    path = tmp_path / "samples" / "session-0000" / "rank-00001.bin"
    path.write_bytes(path.read_bytes()[:-cut_bytes])
    assert list(load_recorded(tmp_path)) == [0, 1]


def test_a_flipped_bit_ends_the_record(tmp_path: Path) -> None:
    _record(tmp_path, 0, 1, 0, 3)
    path = tmp_path / "samples" / "session-0000" / "rank-00000.bin"
    contents = bytearray(path.read_bytes())
    contents[-30] ^= 1
    path.write_bytes(contents)
    assert list(load_recorded(tmp_path)) == [0]


def test_a_missing_step_is_an_error(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, session=0, rank=0, world_size=1, start_step=0)
    for step in (0, 2):
        recorder.add(np.array([step]))
        recorder.end_step(step)
    with pytest.raises(DataError, match="a step is missing"):
        load_recorded(tmp_path)


def test_a_session_is_never_written_twice(tmp_path: Path) -> None:
    _record(tmp_path, 0, 1, 0, 1)
    with pytest.raises(DataError, match="needs its own session number"):
        _record(tmp_path, 0, 1, 0, 1)


def test_a_session_killed_at_its_start_changes_nothing(tmp_path: Path) -> None:
    _record(tmp_path, 0, 1, 0, 2)
    (tmp_path / "samples" / "session-0001").mkdir()
    (tmp_path / "samples" / "session-0001" / "rank-00000.bin").write_bytes(b"LLM")
    assert list(load_recorded(tmp_path)) == [0, 1]


def test_no_record_is_an_empty_history(tmp_path: Path) -> None:
    assert load_recorded(tmp_path) == {}


IDS = st.lists(st.integers(0, 2**31), max_size=30)


@given(IDS, IDS)
def test_checksums_add_up_over_ranks_in_any_order(first: list[int], second: list[int]) -> None:
    together = ids_checksum(np.array([*second, *first[::-1]], np.int64))
    total = ids_checksum(np.array(first, np.int64)) + ids_checksum(np.array(second, np.int64))
    assert (total - together) % 2**64 == 0
    assert -(2**63) <= together < 2**63


def test_checksum_notices_one_other_missing_or_repeated_id() -> None:
    ids = np.arange(100)
    checksum = ids_checksum(ids)
    for wrong in (np.r_[ids[1:], 100], ids[1:], np.r_[ids, 5], np.r_[ids[:-1], 98], np.r_[ids[2:], 0, 2]):
        assert ids_checksum(wrong) != checksum
