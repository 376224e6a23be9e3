from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.errors import ConfigError, DataError
from llmscale.report.run_list import find_runs, is_claimed, read_run
from llmscale.training.run_folder import FAILURE_NAME, RunFolderClaim, record_failure

Record = dict[str, object]


def train(step: int, loss: float | None) -> Record:
    return {"kind": "train", "step": step, "loss": loss, "tokens_seen": step, "tokens_per_second": 1.0}


def event(name: str, step: int) -> Record:
    return {"kind": "event", "event": name, "step": step}


def make_run(folder: Path, *records: Record, total_steps: int = 10, arguments: object = ("--ds", "a b")) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {}, "resolved": {"total_steps": total_steps}}))
    (folder / "starts.jsonl").write_text(json.dumps({"started": "x", "arguments": arguments}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize(
    ("records", "state", "step", "loss"),
    [
        ([event("start", 0), train(5, 3.0), train(10, 2.5), event("finished", 10)], "finished", 10, 2.5),
        ([event("start", 0), train(5, 3.0), event("stopped", 7)], "stopped", 7, 3.0),
        ([event("start", 0), train(5, 3.0), event("stopped", 5)], "stopped", 5, 3.0),
        ([event("start", 0), train(5, 3.0)], "lost", 5, 3.0),
        ([event("start", 0)], "lost", None, None),
        ([], "lost", None, None),
        # It stopped, and was started again.
        ([event("start", 0), train(5, 3.0), event("stopped", 5), event("start", 5), train(8, 2.0)], "lost", 8, 2.0),
        # It went back to a checkpoint.
        ([event("start", 0), train(5, 3.0), train(9, 1.0), event("start", 4)], "lost", 4, None),
        ([event("start", 0), train(3, 3.5), train(9, 1.0), event("start", 4)], "lost", 4, 3.5),
    ],
)
def test_states(records: list[Record], state: str, step: int | None, loss: float | None, tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", *records))
    assert (run.state, run.step, run.loss, run.total_steps) == (state, step, loss, 10)
    assert (run.command, run.problem) == ("train.py --ds 'a b'", "")


@pytest.mark.parametrize(
    ("last", "state", "error"),
    [("start", "failed", "no \x1btoken"), ("finished", "finished", None), ("stopped", "stopped", None)],
)
def test_an_error_that_ended_a_run_is_told(last: str, state: str, error: str | None, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", event("start", 0), train(5, 3.0), event(last, 5))
    record_failure(run, DataError("no \x1btoken\nand more"), step=5, rank=1)
    assert (read_run(run).state, read_run(run).error) == (state, error)
    (run / FAILURE_NAME).write_text('{"error": ')
    assert (read_run(run).error, read_run(run).problem) == (None, f"{FAILURE_NAME} is damaged")


def test_a_run_whose_lock_a_living_process_holds_is_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", event("start", 0), train(1, 3.0))
    code = f"""
from pathlib import Path
from llmscale.training.run_folder import FAILURE_NAME, record_failure
from llmscale.training.run_folder import RunFolderClaim
claim = RunFolderClaim(Path({str(run)!r}))
claim.take()
print("taken", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
        assert is_claimed(run)
        assert read_run(run).state == "running"
        holder.communicate("\n")
    assert not is_claimed(run)
    assert read_run(run).state == "lost"
    # Asking has not taken it.
    claim = RunFolderClaim(run)
    assert claim.take()
    claim.close()


def test_runs_are_found_at_any_depth_the_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("b/c/old", "new", "b/middle")):
        run = make_run(tmp_path / name, train(1, 3.0))
        for file in run.iterdir():
            os.utime(file, (0, {0: 100, 1: 300, 2: 200}[number]))
    (tmp_path / "new" / "inner").mkdir()
    (tmp_path / "new" / "inner" / "metrics.jsonl").write_text("")
    (tmp_path / "b" / "around").symlink_to(tmp_path)
    (tmp_path / "empty").mkdir()
    assert [run.path.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path)] == ["new", "b/middle", "b/c/old"]
    assert [run.path for run in find_runs(tmp_path / "new")] == [tmp_path / "new"]
    assert find_runs(tmp_path / "empty") == []
    with pytest.raises(ConfigError, match="is not a folder"):
        find_runs(tmp_path / "nothing")


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    for name, loss in (("a", None), ("nan", math.nan), ("infinite", math.inf), ("huge", 1e308)):
        assert math.isnan(read_run(make_run(tmp_path / name, train(1, loss))).loss or 0)
    run = make_run(tmp_path / "b")
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": "low"}\n{"kind": "train", "step": -1}\n')
    assert (read_run(run).step, read_run(run).loss) == (3, None)


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", *(train(step, 1 / step) for step in range(1, 20_000))))
    assert (run.step, run.loss) == (19_999, 1 / 19_999)


def test_long_samples_do_not_hide_the_last_step(tmp_path: Path) -> None:
    sample: Record = {"kind": "sample", "step": 9, "prompt": "", "text": "x" * 10_000}
    run = make_run(tmp_path / "run", event("start", 0), *(train(step, 2.0) for step in range(1, 10)), *[sample] * 200)
    assert (read_run(run).step, read_run(run).loss) == (9, 2.0)


def test_half_and_hostile_run_folders_are_a_word(tmp_path: Path) -> None:
    run = make_run(tmp_path / "torn", train(1, 3.0))
    (run / "metrics.jsonl").write_bytes(b'{"kind": "train", "step": 2, "loss": 2.0}\n{"kind": "tra')
    assert (read_run(run).step, read_run(run).problem) == (2, "")
    run = make_run(tmp_path / "damaged", arguments=[1, {}])
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe" * 1000)
    (run / "config.json").write_text("[")
    listed = read_run(run)
    assert (listed.state, listed.command) == ("unreadable", None)
    assert listed.problem == "config.json is damaged; metrics.jsonl is damaged"
    run = make_run(tmp_path / "linked", train(1, 3.0))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    os.mkfifo(run / ".lock")
    assert read_run(run).state == "unreadable"
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    assert "no config.json" in read_run(tmp_path / "folder").problem
    assert len(find_runs(tmp_path)) == 4
