"""`llmscale launch` between two hosts: one short run by default, the faults with -m slow (test_launch_faults.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import checkpoints_folder
from llmscale.cluster.launch.supervisor import read_attempts
from tests import warm_start
from tests.cluster.conftest import SHELL
from tests.cluster.lab import Lab, train_alone, train_arguments
from tests.conftest import REPOSITORY

HOSTILE = "a b  'c' \"d\" $(touch /tmp/executed) `touch /tmp/executed` ; touch /tmp/executed * ~ $HOME \\ %h !! é"


def test_two_hosts_train_as_one_does_with_hostile_arguments_and_stop_when_asked(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    lab.run = lab.folder / f"run {HOSTILE.replace('/', '.')}"
    flags = ("--sample-prompt", HOSTILE, "--sample-every", "1000", "--steps", "300", "--save-every", "0")
    flags += ("--schedule", "constant", "--warmup-steps", "0")
    launch = lab.launch(
        lab.train_arguments(*flags), environment={"HF_HOSTILE": HOSTILE, "TORCH_EXTENSIONS_DIR": str(lab.folder)}
    )
    lab.until_step(3)
    there = lab.hosts[1]
    rank = lab.ranks_of(there)[0]
    environment = dict(
        word.partition("=")[::2] for word in Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0") if word
    )
    assert environment["HF_HOSTILE"] == HOSTILE
    lab.signal_supervisor(signal.SIGTERM)
    assert lab.wait(launch) == 0

    config = json.loads((lab.run / "config.json").read_text())["config"]
    assert config["sample_prompt"] == HOSTILE
    for host in lab.hosts:
        assert "executed" not in host.run(["ls", "/tmp"]).stdout
    (attempt,) = lab.attempts()
    assert (attempt.hosts, attempt.end, attempt.first_step) == ({"node-0": 1, "node-1": 1}, "stopped", 1)
    assert attempt.master.startswith("10.77.0.1:")
    logs = sorted(path.name for path in Path(attempt.logs).iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]
    assert f"stopped by SIGTERM at step {attempt.last_step}" in (Path(attempt.logs) / "rank-00000.log").read_text()
    assert f"\nstopped by SIGTERM at step {attempt.last_step}" in lab.output.read_text()
    lab.check_nothing_left()

    # As far as it came, it did what one process on one host does.
    assert attempt.last_step is not None
    flags = (*flags[:5], str(attempt.last_step), *flags[6:])
    lab.check_equal(train_alone(lab.data, lab.folder / "alone", *flags), attempt.last_step)


def test_a_key_on_the_command_line_is_warned_of_without_its_value(tmp_path: Path) -> None:
    words = ("--env", "MY_API_KEY=canary", "--env", "OMP_NUM_THREADS=1", "--env", "NOT_THERE_TOKEN")
    command = [sys.executable, "-m", "llmscale.cli.main", "launch", *words, "--", "--run", str(tmp_path / "run")]
    done = warm_start.run(command, cwd=REPOSITORY, env={**SHELL, "HOME": str(tmp_path)}, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 2
    assert output.count("WARNING") == 1
    assert "WARNING: --env MY_API_KEY=... can be read by every user" in output
    assert "canary" not in output


#: Every start of a rank ends with an error after its third step.
ENDS_AFTER_THREE = """
from llmscale.training.watchdog import Heartbeat
beat, steps = Heartbeat.beat, []
def end(self, phase, step=None):
    beat(self, phase, step)
    if phase == "training":
        steps.append(step)
    if len(steps) == 3:
        raise RuntimeError("planted")
Heartbeat.beat = end
"""


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--resume", "--init-from"])
def test_a_flag_that_begins_somewhere_acts_once(tiny_set: Path, tmp_path: Path, flag: str) -> None:
    """Every start saves at its second step: 2, 4, 6 and 8 if restarts continue."""
    settings = ("--steps", "8", "--save-every", "2", "--keep-last", "9", "--no-async-save")
    begun = checkpoints_folder(train_alone(tiny_set, tmp_path / "alone", *settings)) / "step-00000002"
    run, planted = tmp_path / "run", tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(ENDS_AFTER_THREE)
    train = train_arguments(tiny_set, run, *settings, flag, str(begun))
    command = [sys.executable, "-m", "llmscale.cli.main", "launch", "--slots", "2", "--", *train]
    variables = {**os.environ, **SHELL, "PYTHONPATH": f"{planted}:{SHELL['PYTHONPATH']}"}
    done = warm_start.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [attempt.first_step for attempt in read_attempts(run)] == ([3, 5, 7] if flag == "--resume" else [1, 3, 5, 7])
    assert f"{flag} {begun} has acted at an earlier start of this launch, and is left out" in done.stdout
    # A job that Slurm starts again repeats the command.
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    (run / "starts.jsonl").write_text(
        (run / "starts.jsonl").read_text().replace('"launches": [', '"launches": ["Slurm job 7", ')
    )
    again = warm_start.run(command, cwd=REPOSITORY, env={**variables, **job}, capture_output=True, text=True)
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stdout + again.stderr
