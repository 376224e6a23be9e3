"""The demo's text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import DataError


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/topics.py").write_text("topics = {'a': 'One.\\n====\\n| x |', 'b': 'One.\\n', 'c': 'Two.'}")
    (tmp_path / "a.py").write_text('"""Reads."""\ndef f():\n    """Writes."""\n')
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "damaged.py").write_text("def")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/other.py").write_text('"""Not read."""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_it_is_docstrings_by_module_and_topics_without_tables(stdlib: Path) -> None:
    source = open_source("python-docs")
    assert [text.strip() for text in source.documents()] == ["Reads.\n\nWrites.", "One.", "One.", "Two."]
    assert source.total_bytes == source.read_bytes


def test_reading_resumes_at_any_place(stdlib: Path) -> None:
    records = list(open_source("python-docs").records((), None))
    for done, record in enumerate(records, start=1):
        assert list(open_source("python-docs").records(record.place, None)) == records[done:]


def test_hosts_with_the_same_library_have_the_same_fingerprint(stdlib: Path) -> None:
    before = open_source("python-docs").fingerprint()
    (stdlib / "a.py").touch()
    assert open_source("python-docs").fingerprint() == before
    (stdlib / "a.py").write_text("")
    assert open_source("python-docs").fingerprint() != before


def test_a_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="holds no sources of Python's standard library"):
        open_source("python-docs")


def test_this_machine_has_megabytes_of_it() -> None:
    assert (open_source("python-docs").total_bytes or 0) > 1_000_000
