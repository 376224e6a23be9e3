"""One run of `llmscale launch` on playground hosts with one fault: start, wait for the moment, compare the end."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import checkpoints_folder, find_damage
from llmscale.cluster.launch.supervisor import read_attempts
from scripts.bench.harness import REPOSITORY, python_path, read_losses, words
from scripts.bench.resume.samples import read_samples
from scripts.playground.hosts import Playground, PlaygroundHost
from scripts.playground.kernel import command_line

STEPS, SAVE_EVERY, GLOBAL_BATCH = 150, 10, 12
RUN_DISK_BYTES = 96 << 20
DEADLINE_S = 240.0
GOOD = "as if nothing had happened"
#: Time limits of `llmscale launch` for hosts that answer at once and steps of milliseconds.
LIMITS = words("--lost-after-s 6 --hang-timeout-s 10 --start-timeout-s 90 --connect-timeout-s 20")


@dataclass
class Fault:
    """A fault and its consequences. Times are in seconds."""

    number: int
    kind: str
    moment: str
    host: str
    num_hosts: int
    ds_config: str
    at_step: int | None = None
    """Last step in metrics.jsonl when it struck."""
    ends: list[str] = field(default_factory=list)
    """Ends of all attempts."""
    hosts_at_the_end: int = 0
    noticed_after_s: float | None = None
    """Time from the fault to the end of the broken attempt and all its processes; None if it broke none."""
    training_again_after_s: float | None = None
    """Time from the fault to the first step of a later attempt."""
    resumed_at_step: int | None = None
    total_s: float = 0.0
    worst_loss_difference: float | None = None
    """Largest relative difference of any step's loss from the untouched run's."""
    verdict: str = ""


def train_arguments(folder: Path, run: Path, ds: Path) -> list[str]:
    """Return train.py's arguments: a tiny fp32 model, every step logged, samples checked."""
    settings = (
        "--model tiny-1m --n-layer 2 --n-head 2 --n-embd 32 --precision fp32 --lr 1e-3 --log-every 1 --val-every 0 "
        f"--global-batch-size {GLOBAL_BATCH} --steps {STEPS} --save-every {SAVE_EVERY} --num-workers 0 --check-every 1"
    )
    return [*words(settings), "--ds", str(ds), "--data", str(folder / "set"), "--run", str(run)]


class Chaos:
    """One run with one fault."""

    def __init__(self, folder: Path, reference: Path, draw: random.Random, number: int, kinds: tuple[str, ...]) -> None:
        self.reference, self.draw = reference, draw
        self.folder = folder / f"fault-{number}"
        self.disk = self.folder / "disk"
        self.run, self.output = self.disk / "run", self.folder / "output.txt"
        self.set_folder = folder
        num_hosts = draw.choice([2, 3])
        self.fault = Fault(
            number=number,
            # Each kind comes equally often.
            kind=kinds[(number - 1) % len(kinds)],
            moment=draw.choices(["start-up", "training", "saving"], weights=[1, 4, 2])[0],
            host=f"node-{draw.randrange(num_hosts)}",
            num_hosts=num_hosts,
            ds_config=draw.choice(["zero1", "zero2", "zero3"]),
        )
        self.struck, self.ended_before = 0.0, 0

    def play(self, strike: Callable[[Chaos], int], tolerance: float) -> Fault:
        """Start the run, cause its fault, wait for the end, compare."""
        self.disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RUN_DISK_BYTES}", "tmpfs", str(self.disk)], check=True)
        began = time.monotonic()
        try:
            with Playground(self.fault.num_hosts, self.folder / "hosts", shared=[self.set_folder]) as playground:
                self.playground = playground
                try:
                    code = strike(self)
                    self.fault.total_s = round(time.monotonic() - began, 1)
                    self.fault.verdict = self.compare(code, tolerance)
                except TimeoutError as error:
                    self.fault.verdict = f"FAILED: {error}"
            self.note_attempts()
            if self.fault.verdict != GOOD:
                lines = [line for line in self.printed().splitlines() if "| loss" not in line]
                print("\n".join(lines[-60:]), file=sys.stderr)
        finally:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)
            shutil.rmtree(self.folder)
        return self.fault

    @property
    def victim(self) -> PlaygroundHost:
        return next(host for host in self.playground.hosts if host.name == self.fault.host)

    def launch(
        self, *flags: str, on: int = 0, ds: Path | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        hostfile = self.playground.write_hostfile(self.folder / "hostfile", 1)
        ds = ds or REPOSITORY / "ds_configs" / f"{self.fault.ds_config}.json"
        command = [sys.executable, *words("-m llmscale.cli.main launch --launcher ssh"), "--hostfile", str(hostfile)]
        command += LIMITS
        command += [*flags, "--", *train_arguments(self.set_folder, self.run, ds)]
        shell = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": python_path(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        with self.output.open("a") as output:
            return self.playground.hosts[on].popen(
                command, cwd=REPOSITORY, environment=shell, stdout=output, stderr=output
            )

    def wait_for_moment(self) -> None:
        """Wait for the moment of the fault; record when it came."""
        self.until(lambda: "attempt 1:" in self.printed())
        if self.fault.moment == "start-up":
            time.sleep(self.draw.uniform(0.5, 5.0))
        else:
            step = self.draw.randrange(3, STEPS // 2)
            self.until(lambda: self.last_step() >= step)
        if self.fault.moment == "saving":
            saves = checkpoints_folder(self.run)
            self.until(lambda: any(saves.glob(".step-*.partial")) or self.last_step() >= STEPS - 20)
            time.sleep(self.draw.uniform(0.0, 0.03))
        self.fault.at_step = self.last_step() or None
        self.struck, self.ended_before = time.monotonic(), self.num_ended()

    def wait(self, launch: subprocess.Popen[str]) -> int:
        """Wait for the end; record when the broken attempt ended and when training began again."""
        deadline = time.monotonic() + DEADLINE_S
        while launch.poll() is None:
            if time.monotonic() > deadline:
                launch.kill()
                raise TimeoutError(f"not finished after {DEADLINE_S:.0f} s")
            self.note_recovery()
            time.sleep(0.05)
        return launch.returncode

    def note_recovery(self) -> None:
        """Record when the broken attempt has ended, and when training has begun again."""
        since_s = round(time.monotonic() - self.struck, 1)
        if self.struck and self.fault.noticed_after_s is None and self.num_ended() > self.ended_before:
            self.fault.noticed_after_s = since_s
        if self.fault.noticed_after_s is not None and self.fault.training_again_after_s is None:
            begun = self.printed().rpartition("rendezvous ")[2]
            if "| loss " in begun and len(read_attempts(self.run)) > self.ended_before + 1:
                self.fault.training_again_after_s = since_s

    def num_ended(self) -> int:
        return sum(attempt.end is not None for attempt in read_attempts(self.run))

    def printed(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def last_step(self) -> int:
        return max(read_losses(self.run), default=0)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the moment of the fault never came")
            time.sleep(0.004)

    def compare(self, code: int, tolerance: float) -> str:
        """Return GOOD, or what is wrong with the run."""
        if code:
            return f"FAILED: exit status {code}"
        expected, consumed = read_samples(self.reference), read_samples(self.run)
        wrong = [s for s in range(STEPS) if s not in consumed or not np.array_equal(consumed[s], expected[s])]
        if wrong or len(consumed) != STEPS:
            return f"FAILED: steps {wrong[:5]} consumed other samples"
        ours, theirs = read_losses(self.run), read_losses(self.reference)
        if sorted(ours) != sorted(theirs):
            return "FAILED: losses are missing"
        worst = max(abs(ours[step] - theirs[step]) / theirs[step] for step in theirs)
        self.fault.worst_loss_difference = worst
        if worst > tolerance:
            return f"FAILED: a loss differs by {worst:.1e}"
        damage = [problem for problem in map(find_damage, list_checkpoints(self.run)) if problem]
        if damage:
            return f"FAILED: a finished checkpoint is damaged: {damage[0]}"
        left = self.left_behind()
        return f"FAILED: left behind: {left}" if left else GOOD

    def left_behind(self) -> list[str]:
        """Return processes of any host, and watch folders and shared memory of hosts that still run sshd."""
        time.sleep(1.0)
        left = []
        for host in self.playground.hosts:
            left += [command_line(pid) for pid in host.pids() if "sshd" not in command_line(pid)]
            if host.pids_running("sshd"):
                left += host.run(["sh", "-c", "ls /dev/shm; cd /tmp; ls -d llmscale* 2>/dev/null"]).stdout.split()
        return left

    def note_attempts(self) -> None:
        attempts = read_attempts(self.run)
        self.fault.ends = [str(attempt.end) for attempt in attempts]
        self.fault.hosts_at_the_end = len(attempts[-1].hosts) if attempts else 0
        if len(attempts) > 1:
            self.fault.resumed_at_step = attempts[-1].first_step

    def supervisor(self, host: PlaygroundHost) -> int:
        return host.pids_running("llmscale.cli.main launch")[-1]

    def rank_of(self, host: PlaygroundHost) -> int:
        """Wait for the process that trains on a host; return its id."""
        ranks: list[int] = []

        def is_found() -> bool:
            ranks[:] = [p for p in host.pids_running("train.py") if is_rank(command_line(p))]
            return bool(ranks)

        self.until(is_found)
        return ranks[0]


def is_rank(line: str) -> bool:
    """Return whether a command line is `python -u .../train.py ...`; its launcher's has -m there."""
    words = line.split()
    return len(words) > 2 and words[2].endswith("/train.py")
