"""Training on a real terminal, and the rows of its view as an emulator shows them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.training.live_view import LiveView, sparkline
from llmscale.training.step_metrics import StepMeter
from tests.conftest import REPOSITORY, read_losses
from tests.terminal_screen import Terminal
from tests.training.made_metrics import make_metrics

FLAGS = ("--precision", "fp32", "--ds", "ds_configs/zero2.json", "--save-every", "0", "--val-every", "40")


@pytest.fixture
def on_terminal(train_command: Callable) -> Callable[..., Terminal]:
    """`on_terminal(*flags)`: `llmscale train` with `ranks` ranks; with 0, one rank without a launcher."""

    def start(*flags: str, ranks: int, columns: int = 100, **variables: str | None) -> Terminal:
        script, *words = train_command(*FLAGS, *flags)
        launcher = [script] if not ranks else ["-m", "llmscale.cli.main", "train", "--nproc-per-node", str(ranks)]
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        return Terminal([sys.executable, *launcher, *words], columns, 24, is_warm=not ranks, **variables)

    return start


def has_view(terminal: Terminal) -> bool:
    return terminal.lines()[-1].startswith("time ")


def assert_sane(terminal: Terminal) -> None:
    assert terminal.screen.margins is None, "the whole screen scrolls again"
    assert not terminal.screen.cursor.hidden
    assert b"\x1b[?25l" not in terminal.raw, "the cursor was never hidden"
    assert not [line for line in terminal.lines() if line.startswith(("time ", "speed "))], terminal.text()


def test_a_run_is_one_view_and_ends_as_lines(on_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """It may end before the second frame, so only the first is waited for."""
    with on_terminal("--steps", "80", ranks=0) as terminal:
        assert terminal.read_until(lambda: terminal.screen.margins is not None), terminal.text()
        margins = terminal.screen.margins
        assert margins is not None and 17 <= margins.bottom < 23, "at most six of 24 rows"
        assert terminal.wait() == 0
        text = terminal.text()
        assert_sane(terminal)
    assert "step     40/80 | validation loss" in text
    assert "step     20/80 |" not in text, "the view has it"
    assert "step     80/80 | loss" in text, "but for the last"
    assert "finished at step 80 of 80" in text
    assert list(read_losses(tmp_path / "run")) == list(range(1, 81))


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
def test_a_run_that_is_asked_to_stop_leaves_the_terminal_sane(
    number: signal.Signals, ranks: int, on_terminal: Callable[..., Terminal]
) -> None:
    with on_terminal("--steps", "100000", ranks=ranks) as terminal:
        assert terminal.read_until(lambda: has_view(terminal)), terminal.text()
        terminal.process.send_signal(number)
        assert terminal.wait() == 0, terminal.text()
        assert_sane(terminal)
        assert f"stopped by {number.name}" in terminal.text()


def test_a_run_that_is_stopped_before_its_first_step_leaves_the_terminal_sane(train_command: Callable) -> None:
    """One rank with nobody above it who would mend the terminal."""
    job = str(Path(__file__).with_name("fault_job.py"))
    command = [sys.executable, job, "stuck", *train_command(*FLAGS, "--steps", "9")[1:]]
    with Terminal(command, 100, 24, is_warm=True, OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY)) as terminal:
        assert terminal.read_until(lambda: "the first step is stuck" in terminal.text()), terminal.text()
        assert terminal.screen.margins is not None
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 0, terminal.text()
        assert_sane(terminal)
        assert "stopped by SIGINT before the first step" in terminal.text()


def test_a_rank_that_is_killed_leaves_the_terminal_sane_and_is_told_of(
    on_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    with on_terminal("--steps", "100000", "--notify", f"cat >> {tmp_path}/told", ranks=1) as terminal:
        assert terminal.read_until(lambda: has_view(terminal)), terminal.text()
        children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert terminal.wait() == 128 + signal.SIGKILL, terminal.text()
        assert_sane(terminal)
        assert "was killed by SIGKILL" in terminal.text()
    (failed,) = map(json.loads, (tmp_path / "told").read_text().splitlines())
    assert (failed["event"], failed["exit_status"]) == ("failed", 137)
    assert "was killed by SIGKILL" in failed["error"]


def test_an_error_is_a_line_below_everything(on_terminal: Callable[..., Terminal]) -> None:
    """At stage 0 a learning rate of 1e30 is the end of a run."""
    flags = ("--ds", "ds_configs/zero0.json", "--lr", "1e30", "--warmup-steps", "0", "--steps", "100000")
    with on_terminal(*flags, ranks=0) as terminal:
        assert terminal.wait() == 2
        assert_sane(terminal)
        assert "error: step" in terminal.text()


def test_plain_lines_where_they_are_wanted(on_terminal: Callable[..., Terminal]) -> None:
    with on_terminal("--steps", "3", "--plain", ranks=0, columns=200) as terminal:
        assert terminal.wait() == 0
        assert all(f"step      {step}/3 | loss" in terminal.text() for step in (1, 2, 3))
        assert b"\x1b" not in terminal.raw


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_draw_gets_lines(term: str | None) -> None:
    code = "import os; from llmscale.training.live_view import open_view; " + (
        "print(open_view('', 1, None, plain=False, variables=os.environ))"
    )
    variables = {"TERM": term, "PYTHONPATH": str(REPOSITORY)}
    with Terminal([sys.executable, "-c", code], 100, 24, is_warm=True, **variables) as terminal:
        assert terminal.wait() == 0
        assert terminal.text().strip() == "None"


@pytest.fixture
def view() -> LiveView:
    """A view of a run at step 500, with a validation."""
    meter = StepMeter(torch.device("cpu"))
    meter.done_steps = 500
    meter.spent_s = {"data_wait": 1.0, "forward_backward": 75.0, "optimizer_step": 10.0, "other": 4.0}
    meter.spent_s |= {"saving": 4.0, "evaluating": 6.0}
    view = LiveView("run · tiny-1m", 2000, meter)
    for step in range(450, 501):
        view.show_step(make_metrics(step=step, loss=3.25 + (500 - step) / 20, loss_scale=65536.0, skipped_steps=2))
    view.show_validation(450, 3.5)
    return view


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines]


def test_a_frame_shows_progress_losses_speed_and_time(view: LiveView) -> None:
    text = "\n".join(plain(view.render(150)))
    for words in (
        "run · tiny-1m",
        "step 500/2,000",
        " 25%",
        "1h02m left",
        "loss  3.2500",
        "validation 3.5000 at 450",
        "lr    6.00e-04",
        "gradient norm 0.500  loss scale 65536 (2 skipped)",
        "12,346 tokens/s",
        "6,173 per device  mfu 41.5%  memory 3.00 GiB",
        "forward/backward 75%",
        "data wait 1%",
        "evaluation 6%",
    ):
        assert words in text, text


@pytest.mark.parametrize("columns", [20, 80])
def test_a_frame_fits_a_narrow_terminal(view: LiveView, columns: int) -> None:
    lines = plain(view.render(columns))
    assert len(lines) == 6
    assert max(len(line) for line in lines) <= columns


def test_a_title_of_control_characters_is_text() -> None:
    lines = LiveView("\x1b[2Jevil\n", 10, StepMeter(torch.device("cpu"))).render(60)
    assert "\\x1b[2Jevil\\n" in plain(lines)[0]
    assert not any("\x1b[2J" in line for line in lines)


def test_no_color_removes_the_colours(view: LiveView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert any(re.search(r"\x1b\[[\d;]*[39]\dm", line) for line in view.render(80))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(re.search(r"\x1b\[[\d;]*[39]\dm", line) for line in view.render(80))


def test_sparklines() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 30)) == 30
    falling = [7.0 - step / 100 for step in range(400)]
    assert sparkline([*falling, 1e9, 3.0], 40)[0] == "█", "one spike does not flatten the rest"


def test_a_loss_that_is_no_number_is_not_in_the_curve(view: LiveView) -> None:
    before = view.render(100)
    view.show_step(make_metrics(step=501, loss=math.nan))
    assert [set(line) & set("▁▂▃▄▅▆▇█") for line in view.render(100)] == [
        set(line) & set("▁▂▃▄▅▆▇█") for line in before
    ]


#: Draws two rows when it is told to on stdin, and prints what it is told otherwise, a line or a part of one.
PROGRAM = """
import os, sys
from llmscale.training.live_view import LiveView

class View(LiveView):
    def __init__(self):
        super().__init__("", 1, None)
        self.number = 0

    def render(self, columns):
        return [f"view {self.number}", "=" * columns]

view = View()
os.write(1, b"ready\\n")
for view.number, line in enumerate(sys.stdin):
    word = line.strip()
    if word == "draw":
        view.draw()
    elif word == "flood":
        # Not by Python's streams, as a C++ library prints.
        os.write(1, "".join(f"line {i}\\n" for i in range(50)).encode())
    elif word == "part":
        os.write(1, b"a part")
    elif word == "rest":
        os.write(1, b" and the rest\\n")
    elif word == "close":
        view.close()
    os.write(1, b"\\x1b]0;done " + str(view.number).encode() + b"\\x07")
"""


class ViewTerminal(Terminal):
    """Runs PROGRAM, word by word."""

    def __init__(self, columns: int = 40, rows: int = 12) -> None:
        super().__init__([sys.executable, "-c", PROGRAM], columns, rows, is_warm=True, PYTHONPATH=str(REPOSITORY))
        self.read_until(lambda: "ready" in self.text())
        self._count = 0

    def tell(self, *words: str) -> list[str]:
        """The screen when all words are obeyed."""
        for word in words:
            self.send(f"{word}\n".encode())
            title = f"done {self._count}"
            self.read_until(lambda title=title: self.screen.title == title)
            self._count += 1
        return self.lines()


def test_what_is_printed_scrolls_above_and_tears_nothing() -> None:
    with ViewTerminal() as terminal:
        lines = terminal.tell("draw", "flood", "draw")
        assert lines[-2:] == ["view 2", "=" * 40]
        assert lines[:9] == [f"line {i}" for i in range(41, 50)]
        assert lines[9] == ""
        assert [f"line {i}" for i in range(50)] == [
            line for line in terminal.text().splitlines() if line.startswith("line")
        ], "what scrolled away is in the terminal's memory, once"


def test_half_a_line_is_left_where_it_is() -> None:
    with ViewTerminal() as terminal:
        lines = terminal.tell("flood", "part", "draw", "rest", "draw")
        assert "a part and the rest" in lines
        assert lines[-2:] == ["view 4", "=" * 40]


def test_closing_gives_everything_back() -> None:
    with ViewTerminal() as terminal:
        lines = terminal.tell("draw", "close", "draw", "flood")
        assert not [line for line in lines if line.startswith(("view", "="))]
        assert lines[10] == "line 49"
        assert terminal.screen.margins is None
        assert not terminal.screen.cursor.hidden


def test_a_terminal_that_changes_its_size_gets_one_view_at_its_bottom() -> None:
    with ViewTerminal() as terminal:
        terminal.tell("draw", "flood")
        for columns, rows in ((30, 20), (60, 9), (40, 12)):
            terminal.resize(columns, rows)
            lines = terminal.tell("draw")
            assert lines[-1] == "=" * columns
            assert lines[-2].startswith("view")
            assert sum(line.startswith("view") for line in lines) == 1


def test_a_terminal_of_few_rows_is_left_to_the_others() -> None:
    with ViewTerminal(40, 5) as terminal:
        assert terminal.tell("draw")[-1] == "=" * 40
        terminal.resize(40, 4)
        assert not [line for line in terminal.tell("draw", "flood") if line.startswith("=")]
