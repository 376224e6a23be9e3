"""The loop of train.py, whose session is made up here: tests/distributed has real ones."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import llmscale.train as program
from llmscale.engine.launcher_variables import LauncherVariables
from llmscale.errors import DataError, TransientError, UnreachableError
from llmscale.training.stop_request import StopRequest


@pytest.mark.parametrize("is_done", [True, False], ids=["nothing left to do", "stopped before its first step"])
def test_nothing_is_announced_while_the_last_checkpoint_is_written(
    is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def note(what: str) -> Any:
        return lambda *args, **values: happened.append(what)

    run: Any = SimpleNamespace(resolved=SimpleNamespace(total_steps=3))
    session = SimpleNamespace(
        run=run,
        step=3 if is_done else 0,
        fetch=lambda step: [],
        decide=lambda step: SimpleNamespace(rollback=False, save=True, stop=True),
        rolls_back_at_end=lambda: False,
        log_last=lambda: None,
        save=note("save"),
        finish=lambda: happened.append("finish") or 0,  # type: ignore[func-returns-value]
    )
    opened: Any = SimpleNamespace(open_session=lambda *parts: nullcontext(session), roll_back=None)
    monkeypatch.setitem(sys.modules, "llmscale.training.open_session", opened)
    monkeypatch.setattr(program, "explained_out_of_memory", lambda run: nullcontext())
    announcer: Any = SimpleNamespace(begin=note("begin"), end=note("end"))
    stop: Any = SimpleNamespace(leave_start_up=lambda: None)
    heartbeat: Any = SimpleNamespace(beat=lambda *words: None)
    assert program.train(run, stop, heartbeat, time.perf_counter(), announcer) == 0
    first_write = next(number for number, what in enumerate(happened) if what in ("save", "finish"))
    assert happened[first_write - 1] == "end"
    assert "begin" not in happened[first_write:]


def test_a_rank_that_a_store_failed_alone_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    here = LauncherVariables(rank=1, world_size=2, local_rank=1)
    everywhere = UnreachableError("everywhere")
    everywhere.is_on_every_rank = True
    for error in (UnreachableError("here"), everywhere, DataError("a shared file")):
        assert program._report_failure(error, here, None, StopRequest()) == 2
    # `llmscale launch` tries again after status 1.
    assert program._report_failure(TransientError("later"), here, None, StopRequest()) == 1
    assert capsys.readouterr().err == "error: here\nerror: later\n"
