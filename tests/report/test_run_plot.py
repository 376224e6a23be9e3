from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.report.data import build_report
from llmscale.report.run_plot import plot_runs
from llmscale.report.save_figure import import_pyplot
from tests.report.runs import full_run, hostile_run, start, train, write_run


def test_draws_as_the_flag_says_whatever_the_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = build_report([full_run(tmp_path / "a$b", 120), full_run(tmp_path / "c")])
    for format, begins in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        plot_runs(tmp_path / "picture.txt", report, format)
        assert (tmp_path / "picture.txt").read_bytes().startswith(begins)


def test_draws_what_a_hostile_run_says_and_a_short_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    short = write_run(tmp_path / "short", [start(tokenizer="other", bytes_per_token=2.0), train(1)])
    plot_runs(tmp_path / "a.png", build_report([hostile_run(tmp_path / "hostile"), short]), "png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[plot\]"):
        import_pyplot()
