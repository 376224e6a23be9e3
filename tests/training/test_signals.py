"""A signal at any moment: both ranks stop at the same step with a whole checkpoint and exit status 0."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import find_checkpoint, list_checkpoints
from llmscale.checkpoint.manifest import find_damage, load_manifest
from tests.conftest import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc to send signals at the right moment")

#: No test needs this long; a hang becomes a failure.
PATIENCE_S = 300


class WatchedJob:
    """Two ranks of a run without end, whose main rank's output is read line by line."""

    def __init__(self, job) -> None:
        self.job, self.lines = job, list[str]()
        self._alarm = threading.Timer(PATIENCE_S, job.kill)
        self._alarm.start()

    def pid(self, rank: int) -> int:
        return self.job.processes[rank].pid

    def wait_for_line(self, text: str) -> None:
        for line in self.job.processes[0].stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"never said {text!r}: {self.lines}")

    def finish(self) -> list[int]:
        """Exit statuses of the ranks, once they have ended."""
        self.lines += self.job.processes[0].stdout.readlines()
        self.lines += self.job.processes[1].stdout.readlines()
        statuses = [process.wait() for process in self.job.processes]
        self._alarm.cancel()
        return statuses

    def cancel(self) -> None:
        self._alarm.cancel()


@pytest.fixture
def start(ranks: Callable, train_command: Callable) -> Iterator[Callable[..., WatchedJob]]:
    started: list[WatchedJob] = []

    def begin(*flags: str, is_cold: bool = False) -> WatchedJob:
        started.append(WatchedJob(ranks(train_command("--steps", "1000000", *flags), 2, is_cold=is_cold)))
        return started[-1]

    yield begin
    for job in started:
        job.cancel()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    return is_in_mask("SigCgt", pid, number)


def is_in_mask(mask: str, pid: int, number: signal.Signals) -> bool:
    """Whether a signal is in a mask of a process, as the kernel shows it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(rf"{mask}:\s*([0-9a-f]+)", status)
    return bool(match and int(match.group(1), 16) >> (number - 1) & 1)


def check_stopped(job: WatchedJob, run: Path, why: str) -> None:
    """Both ranks have ended well, and the newest checkpoint is of the step they stopped at."""
    assert job.finish() == [0, 0], job.lines
    match = re.search(rf"{why} at step (\d+) of 1000000; run folder: {run}", "".join(job.lines))
    assert match, job.lines
    step = int(match.group(1))
    newest = find_checkpoint(run)
    assert find_damage(newest) is None
    assert load_manifest(newest).step == step
    assert load_manifest(newest).world_size == 2
    event = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"]) == ("stopped", step)


def test_ctrl_c_that_reaches_every_process_and_its_data_workers(start: Callable, tmp_path: Path) -> None:
    job = start("--num-workers", "1")
    job.wait_for_line("step      3/")
    for rank in (0, 1):
        os.killpg(job.pid(rank), signal.SIGINT)
    check_stopped(job, tmp_path / "run", "stopped by SIGINT")
    assert "Traceback" not in "".join(job.lines)
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.killpg(job.pid(rank), 0)


def test_during_start_up_nothing_is_trained_and_nothing_saved(start: Callable, tmp_path: Path) -> None:
    """Whether it comes to a step boundary in time or not: within seconds, both ranks, without an error."""
    job = start(is_cold=True)
    wait_until(lambda: handles(job.pid(1), signal.SIGUSR1), "no handlers")
    os.kill(job.pid(1), signal.SIGTERM)
    assert job.finish() == [0, 0], job.lines
    assert len(job.lines) < 15
    assert any("stopped by" in line for line in job.lines)
    assert list_checkpoints(tmp_path / "run") == []
    left = {path.name for path in (tmp_path / "run").glob("*")} | {path.name for path in (tmp_path / "run").glob(".*")}
    assert left != {".lock"}, "a shell of a run that never began"


def test_after_the_first_step_the_run_saves_however_long_its_line_takes_to_end(
    train_command: Callable, tmp_path: Path
) -> None:
    """The step counted as start-up until then, and the run ended with "nothing was trained"."""
    fault_job = str(Path(__file__).with_name("fault_job.py"))
    output = run_ranks([fault_job, "slow-first-line", *train_command("--steps", "1000000")[1:]], 1)
    assert "stopped by SIGTERM at step 1 of 1000000" in output
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000001"]


def test_during_validation(start: Callable, tmp_path: Path) -> None:
    job = start("--val-every", "2", "--val-samples", "100000", "--micro-batch-size", "1")
    job.wait_for_line("step      2/")
    os.kill(job.pid(1), signal.SIGTERM)
    job.wait_for_line("validation loss")
    check_stopped(job, tmp_path / "run", "stopped by SIGTERM on rank 1")


@pytest.mark.parametrize("how", ["--async-save", pytest.param("--no-async-save", marks=pytest.mark.slow)])
def test_during_a_save(start: Callable, tmp_path: Path, how: str) -> None:
    job = start("--save-every", "1", how)
    folder = tmp_path / "run" / "checkpoints"
    wait_until(lambda: len(list(folder.glob("step-*"))) > 1 and bool(list(folder.glob(".step-*.partial"))), "no save")
    os.kill(job.pid(0), signal.SIGUSR1)
    check_stopped(job, tmp_path / "run", "stopped by SIGUSR1")
    assert all(find_damage(path) is None for path in list_checkpoints(tmp_path / "run"))
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_third_sigint_ends_a_rank_that_waits_for_a_peer_that_never_comes(start: Callable) -> None:
    job = start()
    job.wait_for_line("step      3/")
    os.kill(job.pid(1), signal.SIGSTOP)
    wait_until(lambda: uses_no_cpu(job.pid(0)), "rank 0 does not wait")
    for answer in ("saving after this step", "stops without saving"):
        os.kill(job.pid(0), signal.SIGINT)
        job.wait_for_line(answer)
    os.kill(job.pid(0), signal.SIGINT)
    assert job.job.processes[0].wait(PATIENCE_S) == 128 + signal.SIGINT


def uses_no_cpu(pid: int) -> bool:
    """Whether a process does nothing for half a second."""
    before = cpu_ticks(pid)
    time.sleep(0.5)
    return cpu_ticks(pid) == before


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
