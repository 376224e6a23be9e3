from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.sample_log import (
    SampleRecorder,
    begin_session,
    ids_checksum,
    load_recorded,
    next_session,
    read_recorded,
)
from llmscale.errors import ConfigError, DataError


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


def _session(run: Path, start: int, stop: int, history: int, *branches: tuple[int, int], offset: int = 0) -> None:
    place = {"history": history, "branches": [list(branch) for branch in branches]}
    number = begin_session(run, start, place, records=stop > start)
    if stop > start:
        _record(run, number, 1, start, stop, offset)


def test_only_the_steps_that_lead_to_the_last_session_count(tmp_path: Path) -> None:
    """Back to step 2, forward to step 4 of the history that was left, and from there without a record."""
    _session(tmp_path, 0, 5, 1)
    _session(tmp_path, 2, 6, 2, (1, 2), offset=5)
    assert [load_recorded(tmp_path)[step][0] for step in range(6)] == [0, 10, 25, 35, 45, 55]
    _session(tmp_path, 4, 5, 3, (1, 4), offset=7)
    assert [load_recorded(tmp_path)[step][0] for step in range(5)] == [0, 10, 20, 30, 47]
    _session(tmp_path, 5, 5, 3, (1, 4))
    with pytest.raises(DataError, match="step 5 and all later steps"):
        load_recorded(tmp_path)
    _session(tmp_path, 6, 8, 3, (1, 4))
    assert read_recorded(tmp_path).gaps == ("step 5",)
    _session(tmp_path, 3, 5, 4)
    assert list(load_recorded(tmp_path)) == [3, 4], "begun with another run's checkpoint"


@pytest.mark.parametrize("text", ['{"start_step": 1}', '{"start_step": 1, "history": "a", "branches": []}', "[]",
                                  '{"start_step": 1, "history": 1, "branches": [[1]]}'])  # fmt: skip
def test_a_session_that_says_nothing_legal_of_its_history_is_refused(tmp_path: Path, text: str) -> None:
    _session(tmp_path, 0, 1, 1)
    (tmp_path / "samples" / "session-0000" / "session.json").write_text(text)
    with pytest.raises(DataError, match=r"session\.json"):
        read_recorded(tmp_path)


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
    with pytest.raises(DataError, match=r"samples is incomplete, .*Missing: step 1"):
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


@pytest.fixture
def failing_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records cannot be written while it holds True; what is there already can be changed, as on a full disk."""
    fails, pwrite = [False], os.pwrite

    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        if fails[0] and offset + len(data) > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    return fails


def _steps(recorder: SampleRecorder, *steps: int) -> None:
    for step in steps:
        recorder.add(np.array([step]))
        recorder.end_step(step)


def test_a_record_that_is_behind_says_so_at_once_and_not_when_it_has_caught_up(
    tmp_path: Path, failing_disk: list[bool]
) -> None:
    recorder = SampleRecorder(tmp_path, session=0, rank=0, world_size=1, start_step=0)
    _steps(recorder, 0, 1)
    failing_disk[0] = True
    _steps(recorder, 2, 3)
    with pytest.raises(DataError, match="step 2 and all later steps"):
        load_recorded(tmp_path)
    assert list(read_recorded(tmp_path).steps) == [0, 1]
    failing_disk[0] = False
    recorder.close()
    assert list(load_recorded(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("resumed_at", "gap"), [(2, None), (1, None), (3, "step 2"), (4, "steps 2 to 3")])
def test_a_session_that_ended_behind_is_a_gap_unless_its_steps_were_done_again(
    tmp_path: Path, failing_disk: list[bool], resumed_at: int, gap: str | None
) -> None:
    recorder = SampleRecorder(tmp_path, session=0, rank=0, world_size=1, start_step=0)
    _steps(recorder, 0, 1)
    failing_disk[0] = True
    _steps(recorder, 2, 3)
    recorder.close()
    failing_disk[0] = False
    _record(tmp_path, 1, 1, resumed_at, 6)
    recorded = read_recorded(tmp_path)
    assert recorded.gaps == (() if gap is None else (gap,))
    assert list(recorded.steps) == [*range(min(2, resumed_at)), *range(resumed_at, 6)]
    if gap:
        with pytest.raises(DataError, match=f"Missing: {gap}"):
            load_recorded(tmp_path)


def test_a_gap_at_the_very_beginning_and_one_rank_s_gap_are_gaps(tmp_path: Path, failing_disk: list[bool]) -> None:
    first = SampleRecorder(tmp_path, session=0, rank=0, world_size=2, start_step=10)
    second = SampleRecorder(tmp_path, session=0, rank=1, world_size=2, start_step=10)
    _steps(first, 10, 11, 12)
    failing_disk[0] = True
    _steps(second, 10, 11)
    assert read_recorded(tmp_path).gaps == ("step 10 and all later steps",)
    first.close()
    second.close()
    assert list(read_recorded(tmp_path).steps) == []


def test_a_record_that_is_gone_is_not_begun_in_its_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = SampleRecorder(tmp_path, session=0, rank=0, world_size=1, start_step=0)
    recorder.end_step(0)
    (path,) = (tmp_path / "samples").rglob("*.bin")
    path.unlink()
    recorder.end_step(1)
    recorder.close()
    assert not path.exists()
    assert "lacks 1 record of step 1" in capsys.readouterr().err


def test_a_record_that_cannot_be_begun_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("")
    with pytest.raises(ConfigError, match=r"--record-samples: .*rank-00000.bin cannot be written: "):
        SampleRecorder(tmp_path, session=0, rank=0, world_size=1, start_step=0)
