"""`llmscale launch` on playground hosts, with the faults that tests give it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.cluster.launch.supervisor import Attempt, read_attempts
from scripts.bench.resume.samples import read_samples
from scripts.playground.hosts import Playground, PlaygroundHost
from scripts.playground.kernel import command_line
from tests import warm_start
from tests.cluster.conftest import SHELL
from tests.conftest import REPOSITORY, TINY_MODEL, read_losses

GLOBAL_BATCH = 12
#: Time after which something that must happen has not; only a failure takes as long.
PATIENCE_S = 600.0


def train_arguments(data: Path, run: Path, *flags: str, ds_config: str = "zero2") -> list[str]:
    """A tiny model in fp32 on `data`, whose samples are checked at every step."""
    settings = f"--ds ds_configs/{ds_config}.json --precision fp32 --global-batch-size {GLOBAL_BATCH} --lr 1e-3"
    watched = "--log-every 1 --val-every 0 --num-workers 0 --check-every 1"
    return [*settings.split(), *watched.split(), *TINY_MODEL, "--data", str(data), "--run", str(run), *flags]


def train_alone(data: Path, run: Path, *flags: str) -> Path:
    """The same run on one host, by one process that nobody touches; its run folder."""
    command = [sys.executable, "llmscale/train.py", *train_arguments(data, run, *flags)]
    done = warm_start.run(command, cwd=REPOSITORY, env={**os.environ, **SHELL}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@dataclass
class Lab:
    """Hosts, a dataset and a run folder that they share."""

    playground: Playground
    folder: Path
    data: Path
    reference: Path = Path()
    """The run folder of the same run, undisturbed."""
    run: Path = field(init=False)
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.run, self.output = self.folder / "run", self.folder / "output.txt"

    @property
    def hosts(self) -> list[PlaygroundHost]:
        return self.playground.hosts

    def train_arguments(self, *flags: str, ds_config: str = "zero2") -> list[str]:
        return train_arguments(self.data, self.run, *flags, ds_config=ds_config)

    def launch(
        self,
        train: Sequence[str],
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        hostfile: str = "hostfile",
        hang_timeout_s: int = 120,
    ) -> subprocess.Popen[str]:
        """Start it on the first host with a hostfile of `folder`, "" for none; `output` gets all that it prints."""
        self.playground.write_hostfile(self.folder / "hostfile", slots=1)
        limits = ["--lost-after-s", "12", "--hang-timeout-s", str(hang_timeout_s), "--start-timeout-s", "300"]
        command = [sys.executable, "-m", "llmscale.cli.main", "launch", *limits]
        command += [*(["--hostfile", str(self.folder / hostfile)] if hostfile else []), *flags]
        with self.output.open("a") as output:
            return self.hosts[0].popen(
                [*command, "--", *train],
                cwd=REPOSITORY,
                environment={**SHELL, **(environment or {})},
                stdout=output,
                stderr=output,
            )

    def wait(self, launch: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> int:
        try:
            return launch.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.output.read_text()[-4000:]}") from None

    def until_step(self, step: int, times: int = 1) -> None:
        """Until a step at or after `step` was logged, in the `times`-th attempt."""
        self.until(
            lambda: (
                len(read_attempts(self.run)) >= times
                and (self.run / "metrics.jsonl").exists()
                and max(read_losses(self.run), default=0) >= step
            )
        )

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(0.05)

    def ranks_of(self, host: PlaygroundHost) -> list[int]:
        """Its training processes, without what started them and their data workers."""
        # python -u /path/train.py ...: the supervisor's line goes on with -m.
        trainers = {pid for pid in host.pids_running("train.py") if command_line(pid).split()[2].endswith("train.py")}
        return sorted(pid for pid in trainers if _parent(pid) not in trainers)

    def signal_supervisor(self, number: signal.Signals) -> None:
        os.kill(self.hosts[0].pids_running("llmscale.cli.main launch")[-1], number)

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.run)

    def check_equal(self, reference: Path, steps: int) -> None:
        """The same samples at every step, none lost and none twice, and the same losses."""
        expected, consumed = read_samples(reference), read_samples(self.run)
        assert sorted(consumed) == list(range(steps))
        for step in range(steps):
            assert consumed[step].tolist() == expected[step].tolist()
        ours, theirs = read_losses(self.run), read_losses(reference)
        assert sorted(ours) == list(range(1, steps + 1))
        for step in ours:
            assert abs(ours[step] - theirs[step]) <= 2e-5 * theirs[step], step

    def check_nothing_left(self) -> None:
        """On every host that can be reached: only sshd, and nothing in /tmp and /dev/shm."""
        time.sleep(0.5)
        for host in self.hosts:
            if host.is_on and host.pids_running("sshd"):
                left = [command_line(pid) for pid in host.pids() if "sshd" not in command_line(pid)]
                assert not left, left
                names = host.run(["sh", "-c", "ls /dev/shm; cd /tmp; ls -d llmscale* tmp* 2>/dev/null"]).stdout.split()
                assert not names, names


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
