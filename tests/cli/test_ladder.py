"""`llmscale ladder`: a plan from a real dataset, and real runs that are killed and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli import ladder
from llmscale.cli.main import main
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.config.run_keys import keys_of_ladder
from llmscale.planning.scaling_ladder import load_ladder
from llmscale.report.history import load_history
from llmscale.report.run_list import ListedRun, read_run
from llmscale.training.run_folder import record_failure
from tests.report.runs import start, train, write_run

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ("--flops", "1.6e10", "--tokens-per-parameter", "2", "--groups", "2", "--sizes", "4", "--no-held-out")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run file for all runs of a ladder."""
    path = tmp_path / "base.yaml"
    keys = {"ds": "zero0", "precision": "fp32", "positions": "rotary", "num_workers": 0, "val_samples": 4, "lr": 5e-3}
    path.write_text(json.dumps({**keys, "plain": True, "log_every": 5}))
    return path


def plan(tiny_set: Path, base: Path, out: Path, *words: str) -> int:
    return main(["ladder", "plan", "--data", str(tiny_set), "--out", str(out), "--config", str(base), *SMALL, *words])


def test_a_plan_lists_its_cost_and_writes_files_that_train_reads(
    tiny_set: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tiny_set, base, tmp_path / "new", "--flops-per-second", "1e9") == 0
    out = capsys.readouterr().out
    assert "FLOPs = 0.00" in out and "hours at 1e+09 FLOP/s" in out and "0.005 at the least compute" in out
    ladder = load_ladder(tmp_path / "new")
    for run in ladder.runs:
        assert run.name in out
        config = parse_run_config(["--config", str(tmp_path / "new" / "configs" / f"{run.name}.yaml")])
        assert (config.steps, config.lr, config.positions) == (run.steps, run.lr, "rotary")
    words = ["ladder", "plan", "--data", str(tiny_set), "--out", str(tmp_path / "new"), "--flops", "1e9"]
    assert main(words) == 2
    assert "holds a ladder" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(
    tiny_set: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    assert plan(tiny_set, base, tmp_path / "old") == 2
    assert "holds other files, such as notes.txt. Name a new folder." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a ladder of which budget?"),
        (("--hours", "1"), "--hours needs --flops-per-second"),
        (("--flops", "1e9", "--hours", "1", "--flops-per-second", "1e9"), "--hours 1.0 has no effect with --flops"),
    ],
)
def test_a_ladder_without_a_budget_is_refused(
    tiny_set: Path, tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ladder", "plan", "--data", str(tiny_set), "--out", str(tmp_path / "new"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_keys_that_the_ladder_decides_are_refused(
    tiny_set: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base.write_text("steps: 10\nn_layer: 3\n")
    assert plan(tiny_set, base, tmp_path / "new") == 2
    assert "the ladder decides n_layer, steps" in capsys.readouterr().err


def test_every_key_that_changes_tokens_is_decided_by_the_ladder() -> None:
    of_other_things = {"micro_batch_size", "loss_chunk_tokens", "mlp_tile_tokens"}
    keys = {key for key in RunConfig.model_fields if re.search("steps|tokens|batch|ramp", key)}
    assert keys - of_other_things <= {*keys_of_ladder()}


@pytest.mark.parametrize("word", ["--steps", "--lr=1", "--run"])
def test_flags_that_the_ladder_decides_are_refused(
    tiny_set: Path, base: Path, tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tiny_set, base, tmp_path / "new")
    assert main(["ladder", "run", str(tmp_path / "new"), "--", word, "5"]) == 2
    assert "but the run files of the ladder decide it" in capsys.readouterr().err
    assert not list((tmp_path / "new" / "runs").iterdir())


@pytest.mark.parametrize("name", ["law.json", "fit.json", "loss.png"])
def test_a_fit_writes_through_no_link(
    tiny_set: Path, base: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tiny_set, base, tmp_path / "new")
    (tmp_path / "new" / name).symlink_to(tmp_path / "mine")
    assert main(["ladder", "fit", str(tmp_path / "new")]) == 2
    assert f"{name} is a symbolic link, not a regular file, and would be written to" in capsys.readouterr().err


def test_experts_are_refused(tiny_set: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base.write_text('{"model": "tiny-moe-3m", "ds": "zero0"}')
    assert plan(tiny_set, base, tmp_path / "new") == 2
    assert "experts" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.fixture
def states(tiny_set: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """State of each run of the ladder `tmp_path / "new"`, by name, least compute first."""
    plan(tiny_set, base, tmp_path / "new")
    runs = {run.name: run for run in sorted(load_ladder(tmp_path / "new").runs, key=lambda run: run.flops)}
    states = dict.fromkeys(runs, "lost")
    none = read_run(tmp_path / "none")

    def read(run: Path) -> ListedRun:
        return dataclasses.replace(none, state=states[run.name], step=runs[run.name].steps)

    monkeypatch.setattr(ladder, "read_run", read)
    return states


def test_runs_that_another_process_trains_are_left_alone(
    states: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken, *free, taken_later = states
    states[taken] = "running"

    def train(words: list[str], _stopped: list[int]) -> int:
        states[Path(words[-1]).name], states[taken_later] = "finished", "running"
        return 0

    monkeypatch.setattr(ladder, "run_command", train)
    monkeypatch.chdir(REPOSITORY)
    assert main(["ladder", "run", str(tmp_path / "new"), "--slurm"]) == 0
    array = (tmp_path / "new" / "array.sbatch").read_text()
    assert taken not in array and all(name in array for name in (*free, taken_later))
    capsys.readouterr()
    assert main(["ladder", "run", str(tmp_path / "new")]) == 3
    out = capsys.readouterr().out
    assert all(f"{name} is running already" in out for name in (taken, taken_later))
    assert f"left: {taken}, {taken_later}" in out
    assert all(states[name] == "finished" for name in free)


@pytest.mark.parametrize(("number", "status", "returned"), [(15, 0, 143), (2, 1, 130), (None, 7, 7), (None, 0, 1)])
def test_a_ladder_that_stops_says_so_in_its_status(
    states: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int | None,
    status: int,
    returned: int,
) -> None:
    def train(_words: list[str], stopped: list[int]) -> int:
        stopped.extend([number] if number else [])
        return status

    monkeypatch.setattr(ladder, "run_command", train)
    assert main(["ladder", "run", str(tmp_path / "new")]) == returned


def test_a_job_array_has_a_task_for_each_run(
    tiny_set: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a ladder"
    plan(tiny_set, base, folder)
    monkeypatch.chdir(REPOSITORY)
    assert main(["ladder", "run", str(folder), "--slurm"]) == 0
    script = (folder / "array.sbatch").read_text()
    runs = load_ladder(folder).runs
    assert f"#SBATCH --array=0-{len(runs) - 1}" in script and "#SBATCH --requeue" in script
    # Task 2, with a command in the place of bash that prints its words.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin" / "bash").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_ARRAY_TASK_ID": "2", "SLURM_SUBMIT_DIR": str(REPOSITORY)}
    words = subprocess.check_output(["/bin/bash", folder / "array.sbatch"], env=environment, text=True).splitlines()
    least = sorted(runs, key=lambda run: run.flops)[2]
    assert words[0] == "scripts/slurm/train.sbatch"
    assert words[1:3] == ["--config", str(folder / "configs" / f"{least.name}.yaml")]
    assert words[3:] == ["--run", str(folder / "runs" / least.name)]


def sweep(tiny_set: Path, base: Path, out: Path, *words: str) -> int:
    given = ["--flops", "2e9", "--data", str(tiny_set), "--config", str(base), "--tokens-per-parameter", "2"]
    return main(["ladder", "sweep", str(out), *given, *words])


def test_a_sweep_trains_what_is_left_and_takes_further_rates(
    tiny_set: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trained = tmp_path / "new", []

    def run(words: list[str], stopped: list[int]) -> int:
        trained.append(words)
        planned = {run.name: run for run in load_ladder(folder).runs}[Path(words[4]).name]
        if len(trained) == 2:
            stopped.append(signal.SIGINT)
            return 1
        if planned.lr > 1:
            folder_of_run = write_run(Path(words[4]), [start(), train(3)])
            record_failure(folder_of_run, ValueError("the loss is NaN"), step=3, rank=0)
            return 1
        end = {"kind": "validation", "step": planned.steps, "loss": 3 + abs(planned.lr - 2e-3)}
        finished = {"kind": "event", "event": "finished", "step": planned.steps}
        write_run(Path(words[4]), [start(), train(planned.steps, tokens_seen=planned.tokens), end, finished])
        return 0

    monkeypatch.setattr(ladder, "run_command", run)
    rates = ("--rates", "1e-3", "2e-3", "4e-3", "--", "--num-gpus", "1")
    assert sweep(tiny_set, base, folder, *rates) == 128 + signal.SIGINT
    assert sweep(tiny_set, base, folder, *rates) == 0
    names = [Path(words[4]).name for words in trained]
    assert names == ["lr-0.001", "lr-0.002", "lr-0.002", "lr-0.004"], "the finished rate is not repeated"
    assert all(words[-2:] == ["--num-gpus", "1"] for words in trained)
    before = (folder / "configs" / "lr-0.001.yaml").read_text()
    # A rate that diverges does not stop the others.
    assert main(["ladder", "sweep", str(folder), "--rates", "8e-3", "5"]) == 0
    assert [Path(words[4]).name for words in trained[4:]] == ["lr-0.008", "lr-5"]
    added = parse_run_config(["--config", str(folder / "configs" / "lr-0.008.yaml")])
    assert (added.lr, added.positions) == (8e-3, "rotary")
    assert (folder / "configs" / "lr-0.001.yaml").read_text() == before


def test_another_sweep_in_the_folder_is_refused(
    tiny_set: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder, "run_command", lambda _words, stopped: stopped.append(signal.SIGINT) or 1)
    assert main(["ladder", "sweep", str(tmp_path / "new")]) == 2
    assert "holds no sweep. A new one needs --flops C and --data" in capsys.readouterr().err
    sweep(tiny_set, base, tmp_path / "new", "--rates", "1e-3")
    given = ["--data", str(tiny_set), "--config", str(base), "--tokens-per-parameter", "2"]
    assert main(["ladder", "sweep", str(tmp_path / "new"), "--flops", "4e9", *given]) == 2
    assert "holds a sweep of other data, compute or model" in capsys.readouterr().err
    base.write_text(base.read_text().replace('"log_every": 5', '"log_every": 6'))
    assert sweep(tiny_set, base, tmp_path / "new", "--rates", "1e-3") == 2
    assert "lr-0.001.yaml has other keys: --config was another one" in capsys.readouterr().err
    plan(tiny_set, base, tmp_path / "sizes")
    assert main(["ladder", "sweep", str(tmp_path / "sizes")]) == 2
    assert "holds a ladder of sizes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ladder_is_killed_and_resumed(tiny_set: Path, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    plan(tiny_set, base, folder)
    first, *others = sorted(load_ladder(folder).runs, key=lambda run: run.flops)
    words = [
        sys.executable,
        "-m",
        "llmscale",
        "ladder",
        "run",
        str(folder),
        "--",
        "--num-gpus",
        "1",
        "--save-every",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: (read_run(folder / "runs" / first.name).step or 0) >= 5, process)
    # The ladder and `llmscale train`; the rank notices that it is alone, and saves.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: read_run(folder / "runs" / first.name).state in ("stopped", "lost"))
    # SIGTERM to the ladder alone stops the second run, which saves.
    process = subprocess.Popen(words, env=environment, cwd=tmp_path, start_new_session=True)
    second = others[0]
    wait_for(lambda: (read_run(folder / "runs" / second.name).step or 0) >= 1, process)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert read_run(folder / "runs" / first.name).state == "finished"
    assert read_run(folder / "runs" / second.name).state in ("stopped", "finished")
    assert subprocess.run(words, env=environment, cwd=tmp_path, timeout=900).returncode == 0
    for run in (first, *others):
        history = load_history(folder / "runs" / run.name)
        assert history.steps.steps[-1] == run.steps and run.steps in history.validation


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.2)


def test_a_command_that_a_signal_ends_has_the_status_of_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(ladder, "module_command", lambda *_: ends)
    assert ladder.run_command(["train"], []) == 128 + signal.SIGKILL
