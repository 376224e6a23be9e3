"""train.py end to end on two gloo ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


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
