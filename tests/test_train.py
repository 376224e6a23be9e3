"""train.py end to end on two gloo ranks, and its loop with a session that is made up here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
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


def test_trains_logs_and_saves(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    job = ranks(train_command("--steps", "6", "--save-every", "3", "--val-every", "3", "--lr", "1e-2"), 2)
    output = job.wait()[0]
    assert job.exit_codes == [0, 0], output
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    assert [record["step"] for record in records if record["kind"] == "validation"] == [3, 6]
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-00000006"
    assert json.loads((run / "config.json").read_text())["resolved"]["plan"]["global_batch_size"] == 8
    assert json.loads((run / "ds_config.json").read_text())["train_batch_size"] == 8
    assert "start-up: " in output


def test_two_runs_cannot_share_a_folder(ranks: Callable, train_command: Callable) -> None:
    first = ranks(train_command("--steps", "100000", "--log-every", "20", "--save-every", "0"), 1)
    for line in first.processes[0].stdout:
        if "step     20/" in line:
            break
    second = ranks(train_command("--steps", "5"), 1)
    output = second.wait()[0]
    assert second.exit_codes == [2]
    assert f"is in use by process {first.processes[0].pid} on host" in output
    first.kill()
    third = ranks(train_command("--steps", "30"), 1)
    assert "finished at step 30 of 30" in third.wait()[0]


def test_an_end_that_cannot_be_saved_is_not_a_success(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    """The kernel refuses to let any file grow beyond 64 kB, as a full disk would; the optimizer's state is larger."""
    limited = (
        "import resource, runpy, signal, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536));"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    job = ranks(["-c", limited, *train_command("--steps", "4", "--save-every", "2")], 1)
    (output,) = job.wait()
    assert job.exit_codes == [2], output
    assert output.count("was NOT saved") == 2
    assert "step      4/4" in output
    assert "error: training ended at step 4 of 4, but its last checkpoint could not be saved" in output
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
