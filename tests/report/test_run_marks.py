from __future__ import annotations

import math
from pathlib import Path

from llmscale.report.history import load_history
from llmscale.report.run_marks import MOST_MARKS, find_marks, how_it_ended
from tests.report.runs import HOSTILE, full_run, start, train, write_run


def test_a_restart_says_what_changed(tmp_path: Path) -> None:
    marks = find_marks(load_history(full_run(tmp_path)))
    # The slow rank was told of without a step, after the last one.
    expected = [("start", 0), ("end", 20), ("start", 20), ("spike", 21), ("slow", 40), ("end", 40)]
    assert [(mark.kind, mark.step) for mark in marks] == expected
    restart = next(mark for mark in marks if mark.kind == "start" and mark.step == 20)
    assert "ranks 2 → 1" in restart.text and "ZeRO stage 1 → 3" in restart.text
    assert "→" not in restart.text.partition("precision")[2]
    assert restart.short == "1 rank, stage 3"


def test_steps_in_a_row_without_a_loss_are_one_mark(tmp_path: Path) -> None:
    losses = {3: math.nan, 4: math.inf, 7: math.nan}
    run = write_run(tmp_path, [start(), *(train(step, losses.get(step, 2.0)) for step in range(1, 8))])
    marks = [mark for mark in find_marks(load_history(run)) if mark.kind == "nonfinite"]
    assert [mark.step for mark in marks] == [3, 7]
    assert "3 to 4" in marks[0].text


def test_there_are_only_so_many(tmp_path: Path) -> None:
    spikes = [{"kind": "event", "event": "loss_spike", "step": 1, "loss": 1.0}] * (2 * MOST_MARKS)
    assert len(find_marks(load_history(write_run(tmp_path, [train(1), *spikes])))) == MOST_MARKS


def test_the_end(tmp_path: Path) -> None:
    assert how_it_ended(load_history(full_run(tmp_path))) == "finished"
    assert "no end" in how_it_ended(load_history(write_run(tmp_path, [start(), train(1)])))
    ends = {"kind": "event", "event": "stopped", "step": 1, "reason": "stopped by SIGTERM"}
    assert "no end" in how_it_ended(load_history(write_run(tmp_path, [start(), train(1), ends, start(1), train(2)])))


def test_texts_have_no_control_characters(tmp_path: Path) -> None:
    spike = {"kind": "event", "event": "loss_spike", "step": 1, "samples": HOSTILE, "checkpoint": ["\x1b[2J"]}
    for mark in find_marks(load_history(write_run(tmp_path, [start(device=HOSTILE), train(1), spike]))):
        assert mark.text.isprintable()
