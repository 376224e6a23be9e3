"""Training on a real terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TRAIN
from tests.terminal_screen import Terminal

FLAGS = ("--precision", "fp32", "--ds", "ds_configs/zero2.json", "--save-every", "0", "--val-every", "40")


@pytest.fixture
def on_terminal(train_command: Callable) -> Callable[..., Terminal]:
    """`on_terminal(*flags)`: `llmscale train` with two ranks."""

    def start(*flags: str, ranks: int = 2, columns: int = 100, **variables: str | None) -> Terminal:
        words = [word for word in train_command(*FLAGS, *flags) if word != str(TRAIN)]
        command = [sys.executable, "-m", "llmscale.cli.main", "train", "--nproc-per-node", str(ranks), *words]
        return Terminal(command, columns, 24, OMP_NUM_THREADS="1", PYTHONPATH=os.getcwd(), **variables)

    return start


def has_view(terminal: Terminal) -> bool:
    return terminal.lines()[-1].startswith("time ")


def assert_sane(terminal: Terminal) -> None:
    assert terminal.screen.margins is None, "the whole screen scrolls again"
    assert not terminal.screen.cursor.hidden
    assert b"\x1b[?25l" not in terminal.raw, "the cursor was never hidden"
    assert not [line for line in terminal.lines() if line.startswith(("time ", "speed "))], terminal.text()


def test_a_run_is_one_view_and_ends_as_lines(on_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    with on_terminal("--steps", "80") as terminal:
        assert terminal.read_until(lambda: has_view(terminal)), terminal.text()
        margins = terminal.screen.margins
        assert margins is not None and margins.bottom == 17, "six of 24 rows"
        assert terminal.wait() == 0
        text = terminal.text()
        assert_sane(terminal)
    assert "step     40/80 | validation loss" in text
    assert "step     20/80 |" not in text, "the view has it"
    assert "step     80/80 | loss" in text, "but for the last"
    assert "finished at step 80 of 80" in text
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 81))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_leaves_the_terminal_sane(
    number: signal.Signals, on_terminal: Callable[..., Terminal]
) -> None:
    with on_terminal("--steps", "100000", ranks=1) as terminal:
        assert terminal.read_until(lambda: has_view(terminal)), terminal.text()
        terminal.process.send_signal(number)
        assert terminal.wait() == 0, terminal.text()
        assert_sane(terminal)
        assert f"stopped by {number.name}" in terminal.text()


def test_a_run_that_is_stopped_before_its_first_step_leaves_the_terminal_sane(train_command: Callable) -> None:
    """One rank with nobody above it who would mend the terminal."""
    job = str(Path(__file__).parents[1] / "fault_job.py")
    command = [sys.executable, job, "stuck", *train_command(*FLAGS, "--steps", "9")[1:]]
    with Terminal(command, 100, 24, OMP_NUM_THREADS="1", PYTHONPATH=os.getcwd()) as terminal:
        assert terminal.read_until(lambda: terminal.screen.margins is not None), terminal.text()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 0, terminal.text()
        assert_sane(terminal)
        assert "stopped by SIGINT before the first step" in terminal.text()


def test_a_rank_that_is_killed_leaves_the_terminal_sane(on_terminal: Callable[..., Terminal]) -> None:
    with on_terminal("--steps", "100000", ranks=1) as terminal:
        assert terminal.read_until(lambda: has_view(terminal)), terminal.text()
        children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert terminal.wait() == 128 + signal.SIGKILL, terminal.text()
        assert_sane(terminal)
        assert "was killed by SIGKILL" in terminal.text()


def test_an_error_is_a_line_below_everything(on_terminal: Callable[..., Terminal]) -> None:
    """At stage 0 a learning rate of 1e30 is the end of a run."""
    flags = ("--ds", "ds_configs/zero0.json", "--lr", "1e30", "--warmup-steps", "0", "--steps", "100000")
    with on_terminal(*flags, ranks=1) as terminal:
        assert terminal.wait() == 2
        assert_sane(terminal)
        assert "error: step" in terminal.text()


def test_plain_lines_where_they_are_wanted(on_terminal: Callable[..., Terminal]) -> None:
    with on_terminal("--steps", "3", "--plain", ranks=1, columns=200) as terminal:
        assert terminal.wait() == 0
        assert all(f"step      {step}/3 | loss" in terminal.text() for step in (1, 2, 3))
        assert b"\x1b" not in terminal.raw


@pytest.mark.parametrize(("term", "has_one"), [("xterm-256color", True), ("dumb", False), (None, False)])
def test_what_cannot_draw_is_no_terminal_for_a_view(term: str | None, has_one: bool) -> None:
    code = (
        "import os; from llmscale.training.display.display import find_terminal; print(bool(find_terminal(os.environ)))"
    )
    with Terminal([sys.executable, "-c", code], 100, 24, TERM=term, PYTHONPATH=os.getcwd()) as terminal:
        assert terminal.wait() == 0
        assert terminal.text().strip() == str(has_one)
