"""Records that are no documents, beyond what may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.data.prepare.output_folder import RejectedRecords
from llmscale.data.prepare.sources.source import Rejected
from llmscale.errors import DataError


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
