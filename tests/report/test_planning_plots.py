from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.planning.scaling import BESIROGLU, Point
from llmscale.report.planning_plots import plot_isoflops

CHOSEN = Point(7e9, 140e9, 2.2)


def draw(path: Path) -> None:
    plot_isoflops(path, BESIROGLU, CHOSEN, 8e9, "title")


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_says_the_format(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / f"plan.{suffix}")
    assert (tmp_path / f"plan.{suffix}").read_bytes().startswith(magic)


def test_the_picture_names_the_budgets_and_the_chosen_point(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert "7B on 140B tokens: 2.200" in text
    for budget in ("5.88e+19 FLOPs", "5.88e+21 FLOPs", "5.88e+22 FLOPs"):
        assert budget in text


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--plot .*nowhere.* cannot be written: No such file or directory\."):
        draw(tmp_path / "nowhere" / "plan.png")
    with pytest.raises(ConfigError, match=r"cannot be written: Format 'foo' is not supported"):
        draw(tmp_path / "plan.foo")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object, **more: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib: `pip install -e .*\[plot\]'?`\."):
        draw(tmp_path / "plan.png")
