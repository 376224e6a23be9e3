"""What a run's wall time went to, and which share trained steps that count."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.report import run_list
from llmscale.report.history import WALL_TIME, load_history
from tests.conftest import HANG_S, Ranks, read_losses
from tests.report.runs import hostile_run, start, train, write_run

Record = dict[str, object]
#: A second per step, a tenth of it waiting for data.
PHASES = {"data_wait_s": 0.1, "forward_backward_s": 0.5, "optimizer_step_s": 0.3, "other_s": 0.1}


def step(number: int, at: float, **values: object) -> Record:
    return train(number, **{**PHASES, "time": at, **values})


def begin(number: int, at: float, **values: object) -> Record:
    return start(number, time=at, **values)


def shares(folder: Path, records: Iterable[Record | str]) -> dict[str, float]:
    return load_history(write_run(folder, records)).wall_shares()


def seconds(folder: Path, records: Iterable[Record | str], wall_s: float) -> dict[str, float]:
    """Seconds by use, without uses that took none."""
    share_of = shares(folder, records)
    assert math.isclose(sum(share_of.values()), 1) and min(share_of.values()) >= 0
    return {use: round(share * wall_s, 6) for use, share in share_of.items() if share > 1e-12}


def test_an_undisturbed_run(tmp_path: Path) -> None:
    """10 s of start-up, 20 steps, a save of 2 s, a validation of 3 s, and 4 s until the last checkpoint is on disk."""
    records = [
        begin(0, 1000, startup_s=10),
        step(1, 1001),
        step(10, 1010),
        step(20, 1025, paused_s={"saving": 2.0, "evaluating": 3.0}),
        {"kind": "validation", "step": 20, "loss": 2.0, "num_samples": 1, "time": 1026},
        {"kind": "event", "event": "finished", "step": 20, "time": 1030},
    ]
    expected = {"steps": 18.0, "waiting": 2.0, "starts": 10.0, "saves": 6.0, "validation": 4.0}
    assert seconds(tmp_path, records, wall_s=40) == expected
    assert list(shares(tmp_path, records)) == list(WALL_TIME)


def test_redone_steps_count_once(tmp_path: Path) -> None:
    """Saved at 5, killed after 9, training again 21 s later; its steps 6 to 9 were done twice."""
    first = [begin(0, 1000), *(step(n, 1000 + n) for n in range(1, 10))]
    second = [begin(5, 1030), *(step(n, 1025 + n) for n in range(6, 11))]
    seconds_of = seconds(tmp_path, [*first, *second], wall_s=35)
    assert seconds_of == {"steps": 9.0, "waiting": 1.0, "redone": 4.0, "starts": 21.0}


def test_a_branch_that_was_left_does_not_count(tmp_path: Path) -> None:
    """Back from 8 to 2 by --resume: its six steps are redone, though they were saved."""
    first = [begin(0, 1000), *(step(n, 1000 + n) for n in range(1, 9))]
    second = [begin(2, 1010, history=2, branches=[(1, 2)]), *(step(n, 1008 + n) for n in range(3, 6))]
    assert seconds(tmp_path, [*first, *second], wall_s=13) == {
        "steps": 4.5,
        "waiting": 0.5,
        "redone": 6.0,
        "starts": 2.0,
    }


def test_kept_steps_after_the_last_record_count(tmp_path: Path) -> None:
    """Logged every 10, saved at 15, killed at 18: steps 11 to 15 were trained in the time before the restart."""
    records = [begin(0, 1000), step(1, 1001), step(10, 1010), begin(15, 1040), step(16, 1041), step(20, 1045)]
    assert seconds(tmp_path, records, wall_s=45) == {"steps": 18.0, "waiting": 2.0, "starts": 25.0}


def test_a_first_step_that_compiles_counts_as_long_as_the_next(tmp_path: Path) -> None:
    slow = {**PHASES, "forward_backward_s": 60.5}
    records = [begin(0, 1000), step(1, 1061, **slow), step(2, 1062), step(3, 1063)]
    assert seconds(tmp_path, records, wall_s=63) == {"steps": 2.7, "waiting": 0.3, "starts": 60.0}


def test_records_without_times_have_no_shares(tmp_path: Path) -> None:
    assert shares(tmp_path, [start(), train(1), train(2)]) == {}
    # A newer llmscale continued the run: only its part is known.
    records = [start(), train(1), train(2), begin(2, 2000, startup_s=1), step(3, 2001), step(4, 2002)]
    assert seconds(tmp_path, records, wall_s=3) == {"steps": 1.8, "waiting": 0.2, "starts": 1.0}


def test_a_clock_that_goes_back_adds_nothing(tmp_path: Path) -> None:
    records = [begin(0, 5000), step(1, 5001), step(2, 1002), step(3, 1003), begin(3, 900), step(4, 901)]
    assert seconds(tmp_path, records, wall_s=3) == {"steps": 2.6, "waiting": 0.4}


HOSTILE: tuple[object, ...] = (-1, 1e300, math.nan, math.inf, True, "7", None, [], {"saving": 1e300}, 10**30)


@pytest.mark.parametrize("value", HOSTILE, ids=str)
@pytest.mark.parametrize("key", ["time", "paused_s", "startup_s", "data_wait_s", "other_s"])
def test_absurd_values_never_leave_the_hundred_percent(tmp_path: Path, key: str, value: object) -> None:
    records = [
        begin(0, 1000) | {key: value},
        *(step(n, 1000 + n) | ({key: value} if n % 2 else {}) for n in range(1, 9)),
        step(10**6, 1009),
        {"kind": "validation", "step": 9, "loss": 2.0, "num_samples": 1, "time": value},
        {"kind": "event", "event": "stopped", "step": 9, "time": 1010, "paused_s": value},
        begin(4, 1011),
        step(5, 1012),
    ]
    share_of = shares(tmp_path, records)
    assert math.isclose(sum(share_of.values()), 1)
    assert all(0 <= share <= 1 for share in share_of.values())


def test_a_hostile_file_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(hostile_run(tmp_path))]) == 0
    assert "wall time" not in capsys.readouterr().out


def test_runs_reads_the_newest_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", [begin(0, 1000), step(1, 1001), step(2, 1002)])
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "metrics.jsonl").symlink_to(run / "metrics.jsonl")
    by_name = {run.path.name: run.goodput for run in run_list.find_runs(tmp_path)}
    assert by_name == {"a": pytest.approx(0.9), "linked": None}
    monkeypatch.setattr(run_list, "_GOODPUT_BYTES", 10)
    assert {run.goodput for run in run_list.find_runs(tmp_path)} == {None}


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed(
    ranks: Callable[..., Ranks],
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks, saves every 20 steps, SIGKILL after step 30, 2 s of downtime, and the same command again."""
    run = tmp_path / "run"
    command = train_command("--precision", "fp32", "--steps", "60", "--save-every", "20", "--val-every", "30")
    job, deadline = ranks(command, 2), time.monotonic() + HANG_S
    while not (run / "metrics.jsonl").exists() or max(read_losses(run), default=0) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.kill()
    killed_at = time.time()
    done = max(read_losses(run))
    time.sleep(2)
    ranks(command, 2).wait()

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second = (record for record in records if record.get("event") == "start")
    wall_s = records[-1]["time"] - first["time"] + first["startup_s"]
    seconds_of = {use: share * wall_s for use, share in load_history(run).wall_shares().items()}
    assert math.isclose(sum(seconds_of.values()), wall_s, abs_tol=0.01)
    assert seconds_of["starts"] >= first["startup_s"] + second["time"] - killed_at - 0.1
    # Every step counts once; those after the newest checkpoint were trained twice.
    trained = [record for record in records if record["kind"] == "train"]
    phases = {id(record): sum(record[name] for name in PHASES) for record in trained}
    last_of = {record["step"]: phases[id(record)] for record in trained}
    assert sorted(last_of) == list(range(1, 61)) and second["step"] in (20, 40)
    assert done - second["step"] < len(trained) - 60 + 1
    assert seconds_of["steps"] + seconds_of["waiting"] <= sum(last_of.values()) + 0.1
    assert seconds_of["steps"] + seconds_of["waiting"] >= 0.5 * sum(last_of.values())
    assert seconds_of["saves"] > 0 and seconds_of["validation"] > 0 and seconds_of["redone"] > 0

    assert main(["report", str(run)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("wall time"))
    assert f"{seconds_of['steps'] / wall_s:.1%} steps that count" in line
    assert main(["runs", str(run), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["goodput"] == pytest.approx(seconds_of["steps"] / wall_s, rel=1e-3)
