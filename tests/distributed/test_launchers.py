"""Runs of real ranks that are asked to end, under every launcher: they save, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import find_damage
from llmscale.cluster.launch.ranks import descendants, process_state
from llmscale.files.folder_lock import lock_folder
from scripts.playground.kernel import command_line
from tests import warm_start
from tests.conftest import HANG_S, REPOSITORY, TRAIN, free_port

BIN = Path(sys.executable).parent
#: Runs a script with stdin as the terminal of its session.
OWN_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Job:
    """A launcher and all below it, which train in `run`."""

    def __init__(
        self,
        command: list[str],
        output: Path,
        run: Path,
        *,
        is_warm: bool = False,
        variables: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.run, self.output = run, output
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **(variables or {})}
        environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
        with output.open("w") as file:
            start = warm_start.Process if is_warm else subprocess.Popen
            self.process = start(
                command,
                env=environment,
                cwd=REPOSITORY,
                **{"stdout": file, "stderr": file, "start_new_session": True, **settings},  # type: ignore[call-overload]
            )
        self.below: list[int] = []

    def wait(self) -> str:
        """Return the output of a launcher that ends well."""
        assert self.process.wait(HANG_S) == 0, self.output.read_text()
        return self.output.read_text()

    def until_step(self, step: int) -> None:
        self.until(lambda: self.process.poll() is not None or f"step {step:>6}/" in self.output.read_text())
        self.below = descendants(self.process.pid)
        assert len(self.below) >= 2, self.output.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.below if process_state(pid) not in ("", "Z")]

    def check_saved(self, why: str) -> None:
        """It has ended altogether, with a whole checkpoint."""
        self.process.wait(HANG_S)
        self.until(lambda: not self.alive)
        output = self.output.read_text()
        assert why in output, output
        [newest] = list_checkpoints(self.run)
        assert find_damage(newest) is None

    def kill(self) -> None:
        for pid in (self.process.pid, *self.below, *descendants(self.process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture
def start(train_command: Callable, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(launcher: str, *flags: str, ranks: int = 2, steps: int = 1_000_000, **settings: object) -> Job:
        script, *arguments = train_command("--steps", str(steps), *flags)
        command = {
            "deepspeed": ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()), script],
            "torchrun": ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port()), "--", script],
            "llmscale train": ["llmscale", "train", "--nproc-per-node", str(ranks)],
            "python": [sys.executable, script],
            "terminal": [sys.executable, "-c", OWN_TERMINAL, script],
            "python -m": [sys.executable, "-m", "llmscale.train"],
        }[launcher]
        jobs.append(Job([*command, *arguments], tmp_path / "output.txt", tmp_path / "run", **settings))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def test_sigterm_to_deepspeed_which_does_not_pass_it_on(start: Callable) -> None:
    """The one default test with the real launcher; the others below are slow."""
    job = start("deepspeed", "--num-workers", "1", ranks=1)
    job.until_step(3)
    job.process.terminate()
    job.check_saved(f"stopped by the end of its launcher (deepspeed, process {job.process.pid})")
    lock_folder(job.run).close()  # another start may have it


def test_a_killed_data_worker_ends_the_run_with_one_line(start: Callable) -> None:
    job = start("python", "--num-workers", "1", is_warm=True)
    job.until(lambda: "step      3/" in job.output.read_text())
    [worker] = descendants(job.process.pid)
    os.kill(worker, signal.SIGKILL)
    assert job.process.wait(HANG_S) == 1, "2 would be the user's mistake, which launch does not try again"
    lines = [line for line in job.output.read_text().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"Data worker 0 (process {worker}) was killed by SIGKILL" in lines[0]


def test_a_terminal_that_is_closed(start: Callable) -> None:
    """Nothing can be printed any more: not even that must cost the save."""
    master, terminal = os.openpty()
    message: list[bytes] = []
    job = start("terminal", is_warm=True, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    while b"step      3/" not in b"".join(message):
        message.append(os.read(master, 4096))
    os.close(master)
    assert job.process.wait(HANG_S) == 0
    [newest] = list_checkpoints(job.run)
    assert find_damage(newest) is None


def test_a_reader_that_ends_first_does_not_end_the_run(start: Callable) -> None:
    """Ctrl-C ends tee at once in `llmscale train ... | tee`."""
    job = start("python", "--save-every", "0", steps=60, is_warm=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if b"step      3/" in line:
            break
    job.process.stdout.close()
    assert job.process.wait(HANG_S) == 0
    assert [path.name for path in list_checkpoints(job.run)] == ["step-00000060"]


@pytest.mark.slow
@pytest.mark.parametrize("when", [0.7, 2.0, 4.0, 6.0])
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "llmscale train", "python -m"])
def test_sigterm_during_start_up(start: Callable, launcher: str, when: float) -> None:
    job = start(launcher)
    time.sleep(when)
    job.below = descendants(job.process.pid)
    job.process.terminate()
    job.process.wait(HANG_S)
    job.until(lambda: not job.alive)
    assert len(job.output.read_text().splitlines()) < 60
    assert "Traceback" not in job.output.read_text() or launcher == "torchrun"  # its own


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "llmscale train"])
def test_every_signal_to_every_launcher(start: Callable, launcher: str, number: signal.Signals) -> None:
    job = start(launcher, "--num-workers", "1")
    job.until_step(3)
    job.process.send_signal(number)
    job.check_saved("stopped by ")
    lock_folder(job.run).close()  # another start may have it
    assert launcher != "llmscale train" or job.process.returncode == (-9 if number == signal.SIGKILL else 0)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "llmscale train", "python"])
def test_sigterm_to_the_whole_group(start: Callable, launcher: str) -> None:
    job = start(launcher, "--num-workers", "1")
    job.until_step(3) if launcher != "python" else job.until(lambda: "step      3/" in job.output.read_text())
    os.killpg(job.process.pid, signal.SIGTERM)
    job.check_saved("stopped by SIGTERM")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_by_the_other(start: Callable, launcher: str, rank: int) -> None:
    job = start(launcher)
    job.until_step(3)
    ranks = [pid for pid in job.below if str(TRAIN) in command_line(pid).split()[:4]]
    (victim,) = [pid for pid in ranks if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()]
    os.kill(victim, signal.SIGKILL)
    assert job.process.wait(HANG_S) != 0
    text = job.output.read_text()
    # torchrun may reap the process before the other rank can look.
    assert re.search(rf"error: rank {rank} (\(process {victim}\) was killed by SIGKILL|on this)", text), text
    assert "please report it" not in text


@pytest.mark.slow
def test_sigkill_to_the_launcher_that_deepspeed_starts(start: Callable) -> None:
    job = start("deepspeed")
    job.until_step(3)
    os.kill(job.below[0], signal.SIGKILL)
    job.check_saved("stopped by the end of its launcher (deepspeed.launcher.launch, process")


@pytest.mark.slow
def test_a_shell_that_ends_leaves_a_run_as_it_is(start: Callable, train_command: Callable, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "out").touch()
    flags = train_command("--steps", "1000000", "--run", str(tmp_path / "other"))
    words = " ".join(f"'{word}'" for word in [sys.executable, *flags])
    job = start("python", steps=1)
    job.process.wait(HANG_S)
    subprocess.run(
        ["bash", "-c", f"nohup {words} > {tmp_path}/out 2>&1 & echo $! > {pid_file}"],
        check=True,
        cwd=REPOSITORY,
    )
    pid = int(pid_file.read_text())
    job.below = [pid]
    job.until(lambda: "step     50/" in (tmp_path / "out").read_text())
    os.kill(pid, signal.SIGHUP)
    time.sleep(2.0)
    assert process_state(pid) not in ("", "Z")
