from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.report.save_figure import save_figure

pytest.importorskip("matplotlib").use("Agg")


def draw(path: Path) -> None:
    from matplotlib import pyplot

    save_figure(pyplot.figure(), path)


@pytest.mark.parametrize(
    ("name", "begin"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("no suffix", b"\x89PNG")]
)
def test_the_suffix_says_the_format(tmp_path: Path, name: str, begin: bytes) -> None:
    draw(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begin)
    assert os.listdir(tmp_path) == [name]


def test_a_picture_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "old.png").write_bytes(b"an older picture")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        for name in ("new.png", "old.png"):
            with pytest.raises(ConfigError, match=rf"--plot .*{name} cannot be written: File too large\."):
                draw(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["old.png"]
    assert (tmp_path / "old.png").read_bytes() == b"an older picture"


@pytest.mark.parametrize("name", ["a.bmp2", "no/folder/a.png", "folder"])
def test_a_place_or_a_format_that_cannot_be_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"--plot .* cannot be written: "):
        draw(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder"]
