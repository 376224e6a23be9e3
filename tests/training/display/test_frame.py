from __future__ import annotations

import math
import re

import pytest

from llmscale.training.display.frame import Curve, RunProgress, render_frame, sparkline
from tests.training.made_metrics import make_metrics

SPENT = {"data_wait": 1.0, "forward_backward": 75.0, "optimizer_step": 10.0, "other": 2.0, "saving": 4.0}
SPENT |= {"evaluating": 6.0, "starting": 2.0}


@pytest.fixture
def progress() -> RunProgress:
    metrics = make_metrics(step=500, loss=3.25, loss_scale=65536.0, skipped_steps=2)
    found = RunProgress("run · tiny-1m", 2000, 500, 90.0, metrics=metrics, validation=(450, 3.5), spent_s=SPENT)
    for step in range(50):
        found.loss.add(6.0 - step / 20)
        found.learning_rate.add(6e-4)
    return found


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines]


def test_a_frame_says_all_that_there_is_to_know(progress: RunProgress) -> None:
    text = "\n".join(plain(render_frame(progress, 120, 6)))
    for words in (
        *("run · tiny-1m", "step 500/2,000", "25.0%", "1m30s gone", "1h02m left"),
        *("loss 3.2500", "validation 3.5000 at 450", "lr   6.00e-04", "gradient norm 0.500"),
        *("loss scale 65536 (2 skipped)", "12,346 tokens/s", "6,173 per device", "mfu 41.5%", "memory 3.00 GiB"),
        *("forward/backward 75%", "step 10%", "data wait 1%", "save 4%", "evaluation 6%", "other 4%"),
    ):
        assert words in text, text


@pytest.mark.parametrize("columns", [20, 33, 80, 200])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_it_fits_any_terminal(progress: RunProgress, columns: int, rows: int) -> None:
    lines = plain(render_frame(progress, columns, rows))
    assert len(lines) == rows
    assert max(len(line) for line in lines) <= columns
    assert any("step 500" in line for line in lines), "the last that goes"


def test_a_title_of_control_characters_is_text() -> None:
    lines = render_frame(RunProgress("\x1b[2Jevil\n", 10), 60, 6)
    assert "\\x1b[2Jevil\\n" in plain(lines)[0]
    assert not any("\x1b[2J" in line for line in lines)


def test_no_colour_where_none_is_wanted(progress: RunProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert any("\x1b[3" in line or "\x1b[9" in line for line in render_frame(progress, 80, 6))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(re.search(r"\x1b\[[\d;]*[39]\dm", line) for line in render_frame(progress, 80, 6))


def test_sparklines() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([1.0, math.nan, 2.0, math.inf], 4) == "▁ █ "
    assert sparkline([math.nan] * 3, 3) == "   "
    falling = [7.0 - step / 100 for step in range(400)]
    assert sparkline([*falling, 1e9, 3.0], 40)[0] == "█", "one spike does not flatten the rest"


def test_a_curve_stays_small() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(float(step))
    assert 2000 < len(curve.values) <= 4097
    assert curve.values == sorted(curve.values)
    assert curve.values[-1] > 95_000
