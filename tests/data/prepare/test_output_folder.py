"""What killed processes left is cleared up; what one writes just now is left alone; rejected records."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmscale.data.prepare.output_folder import RejectedRecords, find_writer, new_folder, open_work_folder, recover
from llmscale.data.prepare.sources.source import Rejected
from llmscale.errors import DataError, MachineError

#: A process that lives: this one's parent.
ALIVE = os.getppid()


def test_what_dead_processes_left_blocks_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for kind in ("partial", "replaced"):
        left = tmp_path / f".out.{kind}-another-host-{ALIVE}"
        left.mkdir()
        (left / "file").write_text(kind)
    work = tmp_path / ".out.partial-prepare"
    work.mkdir()
    assert find_writer(out) is None
    recover(out)
    assert sorted(tmp_path.iterdir()) == [work, out] and (out / "file").read_text() == "replaced"


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_folder(out, replace=False) as partial:
        (partial / "file").write_text("new")
        assert find_writer(out) == partial
        recover(out)
        assert partial.exists() and not out.exists()
    assert (out / "file").read_text() == "new" and find_writer(out) is None
    with new_folder(out, replace=True) as partial:
        (partial / "file").write_text("newer")
    assert (out / "file").read_text() == "newer" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DataError, "Cannot write .*/out: No space left on device"),
        (OSError(errno.EMFILE, "Too many open files"), MachineError, r"^Too many open files.*`ulimit -n`"),
        (OSError(errno.ENOSPC, "No space left", "/dev/shm/sem.x"), DataError, "^/dev/shm/sem.x: No space left"),
    ],
)
def test_an_error_of_the_system_is_named_by_what_failed(
    error: OSError, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message), new_folder(tmp_path / "out", replace=False):
        raise error
    with pytest.raises(kind, match=message), open_work_folder(tmp_path / "out", {}):
        raise error
    assert not list(tmp_path.iterdir())


def _records(count: int) -> list[Rejected]:
    return [Rejected(f"line {number}", "no JSON", b"{", (number,)) for number in range(count)]


def test_a_lower_limit_than_before_the_interruption_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "set.rejected.jsonl"
    before = RejectedRecords(path, 5)
    before.add(_records(5))
    contents = path.read_bytes()
    with pytest.raises(DataError, match=r"5 records .* more than --max-rejected 3.*--max-rejected 5"):
        RejectedRecords(path, 3).resume(before.size_bytes, before.num_records)
    assert path.read_bytes() == contents
    again = RejectedRecords(path, 5)
    again.resume(before.size_bytes, before.num_records)
    with pytest.raises(DataError, match="line 0"):
        again.add(_records(1))
    assert path.read_bytes() == contents
