#!/usr/bin/env python3
"""Break a cluster under `llmscale launch`, one fault per run, and compare each run with one that nobody touched.

    sudo python scripts/bench/cluster_chaos.py --faults 24 --seed 1

The hosts are the playground's: namespaces with their own addresses, sshd and processes; the supervisor runs on node-0.
Each fault has its own run, with a ds_config, a number of hosts, a way to them and a moment drawn from the seed. Each
run must end with status 0, must have consumed exactly the samples of the untouched run at every step, must reach the
same losses within --tolerance (relative, fp32 weights), and must leave no process, watch folder or shared memory on any
host. Exit status 1 when any of it is not so.

Everything happens in a mount namespace of this script's own: the run folders lie on a small file system that can be
filled to the last byte.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from llmscale.checkpoint.manifest import checkpoints_folder, find_damage, list_checkpoints  # noqa: E402
from llmscale.cluster.attempts import read_attempts  # noqa: E402
from llmscale.cluster.ops import NVME_OPS  # noqa: E402
from llmscale.data.record import load_recorded  # noqa: E402
from scripts.playground.hosts import Playground, PlaygroundHost, why_impossible  # noqa: E402
from scripts.playground.kernel import command_line  # noqa: E402

STEPS, SAVE_EVERY, GLOBAL_BATCH = 150, 10, 12
RUN_DISK_BYTES = 96 << 20
DEADLINE_S = 240.0
OWN_NAMESPACE = "LLMSCALE_CHAOS_NAMESPACE"
#: `llmscale launch` for hosts that answer at once and steps of milliseconds.
LIMITS = ("--lost-after-s", "6", "--hang-timeout-s", "10", "--start-timeout-s", "90", "--connect-timeout-s", "20")
KINDS = (
    *("rank killed", "rank stopped", "link cut", "host killed", "supervisor killed", "disk full", "stale lock"),
    *("port taken",),
)


@dataclass
class Fault:
    """One fault and what came of it. Times in seconds."""

    number: int
    kind: str
    moment: str
    host: str
    num_hosts: int
    ds_config: str
    launcher: str
    starter: str
    at_step: int | None = None
    """Last step in metrics.jsonl when it struck."""
    ends: list[str] = field(default_factory=list)
    """How each attempt ended."""
    hosts_at_the_end: int = 0
    noticed_after_s: float | None = None
    """From the fault to the end of the attempt that it broke, all its processes included; None when it broke none."""
    training_again_after_s: float | None = None
    """From the fault to the first step of a later attempt."""
    resumed_at_step: int | None = None
    total_s: float = 0.0
    worst_loss_difference: float | None = None
    """Largest relative difference of any step's loss from the untouched run's."""
    verdict: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference of any loss")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these kinds")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    reason = why_impossible()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if OWN_NAMESPACE not in os.environ:
        os.environ[OWN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    faults = []
    with tempfile.TemporaryDirectory(prefix="cluster-chaos-") as scratch:
        folder = Path(scratch)
        prepare_text(folder)
        reference = train_untouched(folder)
        build_ops(folder)
        draw = random.Random(args.seed)
        print_head()
        for number in range(1, args.faults + 1):
            fault = Chaos(folder, reference, draw, number, args.kind or KINDS).play(args.tolerance)
            faults.append(fault)
            print_row(fault)
    failed = [fault for fault in faults if fault.verdict != "as if nothing had happened"]
    print(f"{len(faults) - len(failed)} of {len(faults)} runs ended as if nothing had happened")
    if args.json:
        table = {"seed": args.seed, "steps": STEPS, "tolerance": args.tolerance, "machine": machine_words()}
        args.json.write_text(json.dumps({**table, "faults": [asdict(fault) for fault in faults]}, indent=1) + "\n")
    return int(bool(failed))


def machine_words() -> str:
    return f"{os.cpu_count()} cores; all hosts on this one machine; start-up alone takes most of each recovery"


def prepare_text(folder: Path) -> None:
    command = [sys.executable, "-m", "llmscale.cli.main", "data", "prepare", "--input", json.__path__[0]]
    command += ["--out", str(folder / "set"), "--tokenizer", "bytes", "--seq-len", "32", "--val-fraction", "0"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*command, "--workers", "1"], check=True, env=environment, stdout=subprocess.DEVNULL)


def build_ops(folder: Path) -> None:
    """The ops that NVMe offload needs, which the stale locks are planted on."""
    command = [sys.executable, "-m", "llmscale.cluster.build_ops", *NVME_OPS]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the ops of NVMe offload cannot be built here (libaio-dev?): {done.stderr.strip()}")


def train_arguments(folder: Path, run: Path, ds: Path) -> list[str]:
    """Of train.py: a tiny model in fp32 whose every step is logged and whose samples are recorded."""
    return [
        *("--ds", str(ds), "--data", str(folder / "set"), "--model", "tiny-1m", "--n-layer", "2", "--n-head", "2"),
        *("--n-embd", "32", "--precision", "fp32", "--global-batch-size", str(GLOBAL_BATCH), "--steps", str(STEPS)),
        *("--lr", "1e-3", "--log-every", "1", "--save-every", str(SAVE_EVERY), "--val-every", "0"),
        *("--num-workers", "0", "--record-samples", "--run", str(run)),
    ]


def train_untouched(folder: Path) -> Path:
    run = folder / "untouched"
    arguments = train_arguments(folder, run, REPOSITORY / "ds_configs" / "zero1.json")
    command = [sys.executable, str(REPOSITORY / "llmscale" / "train.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the untouched run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return run


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
            # In turns, so that each kind comes equally often.
            kind=kinds[(number - 1) % len(kinds)],
            moment=draw.choices(["start-up", "training", "saving"], weights=[1, 4, 2])[0],
            host=f"node-{draw.randrange(num_hosts)}",
            num_hosts=num_hosts,
            ds_config=draw.choice(["zero1", "zero2", "zero3"]),
            launcher=draw.choice(["ssh", "ssh", "pdsh"]),
            starter=draw.choice(["deepspeed", "deepspeed", "torchrun"]),
        )
        self.struck, self.ended_before = 0.0, 0

    def play(self, tolerance: float) -> Fault:
        """Start, strike, wait for the end, compare."""
        self.disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RUN_DISK_BYTES}", "tmpfs", str(self.disk)], check=True)
        began = time.monotonic()
        try:
            with Playground(self.fault.num_hosts, self.folder / "hosts", shared=[self.set_folder]) as playground:
                self.playground = playground
                try:
                    code = STRIKES[self.fault.kind](self)
                    self.fault.total_s = round(time.monotonic() - began, 1)
                    self.fault.verdict = self.compare(code, tolerance)
                except TimeoutError as error:
                    self.fault.verdict = f"FAILED: {error}"
            self.note_attempts()
            if self.fault.verdict != "as if nothing had happened":
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
        ways = ["--launcher", self.fault.launcher, "--starter", self.fault.starter]
        command = [sys.executable, "-m", "llmscale.cli.main", "launch", "--hostfile", str(hostfile), *LIMITS, *ways]
        command += [*flags, "--", *train_arguments(self.set_folder, self.run, ds)]
        shell = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        with self.output.open("a") as output:
            return self.playground.hosts[on].popen(
                command, cwd=REPOSITORY, environment=shell, stdout=output, stderr=output
            )

    def wait_for_moment(self) -> None:
        """Until the moment of the fault; notes when and where it came."""
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
        """To the end; notes when the broken attempt had ended and when there was training again."""
        deadline = time.monotonic() + DEADLINE_S
        while launch.poll() is None:
            if time.monotonic() > deadline:
                launch.kill()
                raise TimeoutError(f"not finished after {DEADLINE_S:.0f} s")
            self.note_recovery()
            time.sleep(0.05)
        return launch.returncode

    def note_recovery(self) -> None:
        """How long after the fault its attempt had ended, and there was training again."""
        since_s = round(time.monotonic() - self.struck, 1)
        if self.struck and self.fault.noticed_after_s is None and self.num_ended() > self.ended_before:
            self.fault.noticed_after_s = since_s
        if self.fault.noticed_after_s is not None and self.fault.training_again_after_s is None:
            begun = self.printed().rpartition("meeting at")[2]
            if "start-up:" in begun and len(read_attempts(self.run)) > self.ended_before + 1:
                self.fault.training_again_after_s = since_s

    def num_ended(self) -> int:
        return sum(attempt.end is not None for attempt in read_attempts(self.run))

    def printed(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def last_step(self) -> int:
        return max(losses_of(self.run), default=0)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the moment of the fault never came")
            time.sleep(0.004)

    def compare(self, code: int, tolerance: float) -> str:
        """What must be true of the run, in one line."""
        if code:
            return f"FAILED: exit status {code}"
        expected, consumed = load_recorded(self.reference), load_recorded(self.run)
        wrong = [s for s in range(STEPS) if s not in consumed or not np.array_equal(consumed[s], expected[s])]
        if wrong or len(consumed) != STEPS:
            return f"FAILED: steps {wrong[:5]} consumed other samples"
        ours, theirs = losses_of(self.run), losses_of(self.reference)
        if sorted(ours) != sorted(theirs):
            return "FAILED: losses are missing"
        worst = max(abs(ours[step] - theirs[step]) / theirs[step] for step in theirs)
        self.fault.worst_loss_difference = worst
        if worst > tolerance:
            return f"FAILED: a loss differs by {worst:.1e}"
        damage = [found for found in map(find_damage, list_checkpoints(self.run)) if found]
        if damage:
            return f"FAILED: a finished checkpoint is damaged: {damage[0]}"
        left = self.left_behind()
        return f"FAILED: left behind: {left}" if left else "as if nothing had happened"

    def left_behind(self) -> list[str]:
        """Processes on any host, and watch folders and shared memory where something can still be started."""
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
        """The process that trains there; waits for it."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [p for p in host.pids_running("train.py") if _is_rank(command_line(p))]
            return bool(found)

        self.until(look)
        return found[0]


def _is_rank(line: str) -> bool:
    """python -u .../train.py ...: what starts it has -m there."""
    words = line.split()
    return len(words) > 2 and words[2].endswith("/train.py")


def kill_rank(chaos: Chaos) -> int:
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.rank_of(chaos.victim), signal.SIGKILL)
    return chaos.wait(launch)


def stop_rank(chaos: Chaos) -> int:
    # A rank that is stopped while it starts is found by the bound on starts, which is long.
    chaos.fault.moment = "training" if chaos.fault.moment == "start-up" else chaos.fault.moment
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.rank_of(chaos.victim), signal.SIGSTOP)
    return chaos.wait(launch)


def cut_link(chaos: Chaos) -> int:
    launch = chaos.launch()
    chaos.wait_for_moment()
    chaos.victim.cut_link()
    return chaos.wait(launch)


def kill_host(chaos: Chaos) -> int:
    """Its sshd and all else: nothing can be started there any more. With the supervisor's host the next launch is
    started on another."""
    launch = chaos.launch()
    chaos.wait_for_moment()
    for pid in chaos.victim.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if chaos.fault.host != "node-0":
        return chaos.wait(launch)
    launch.wait()
    return chaos.wait(chaos.launch(on=1))


def kill_supervisor(chaos: Chaos) -> int:
    chaos.fault.host = "node-0"
    launch = chaos.launch()
    chaos.wait_for_moment()
    os.kill(chaos.supervisor(chaos.playground.hosts[0]), signal.SIGKILL)
    launch.wait()
    time.sleep(chaos.draw.uniform(0.0, 2.0))
    return chaos.wait(chaos.launch())


def fill_disk(chaos: Chaos) -> int:
    """Fill the run folder's file system to the last byte while a checkpoint is written; room is made again later."""
    chaos.fault.moment, chaos.fault.host = "saving", "-"
    launch = chaos.launch()
    chaos.wait_for_moment()
    filler = chaos.disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 10, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    time.sleep(chaos.draw.uniform(2.0, 8.0))
    filler.unlink()
    return chaos.wait(launch)


def plant_lock(chaos: Chaos) -> int:
    """A lock of a build that was killed an hour ago, in the cache of an op that this run loads: NVMe offload's."""
    chaos.fault.moment, chaos.fault.host, chaos.fault.ds_config = "start-up", "-", "zero3_nvme"
    cache, nvme = chaos.folder / "extensions", chaos.folder / "nvme"
    nvme.mkdir()
    shutil.copytree(chaos.set_folder / "extensions", cache)
    for op in NVME_OPS:
        (cache / op / "lock").touch()
        os.utime(cache / op / "lock", (time.time() - 3600,) * 2)
    config = json.loads((REPOSITORY / "ds_configs" / "zero3_nvme.json").read_text())
    for name in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][name]["nvme_path"] = str(nvme)
    ds = chaos.folder / "nvme.json"
    ds.write_text(json.dumps(config))
    return chaos.wait(chaos.launch(ds=ds, environment={"TORCH_EXTENSIONS_DIR": str(cache)}))


def take_port(chaos: Chaos) -> int:
    chaos.fault.moment, chaos.fault.host = "start-up", "node-0"
    port = chaos.draw.randrange(20000, 30000)
    code = f"import socket, time; s = socket.create_server(('', {port})); print(1, flush=True); time.sleep(1000)"
    squatter = chaos.playground.hosts[0].popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert squatter.stdout is not None
    squatter.stdout.readline()
    status = chaos.wait(chaos.launch("--master-port", str(port)))
    for pid in chaos.playground.hosts[0].pids_running("create_server"):
        os.kill(pid, signal.SIGKILL)
    squatter.wait()
    return status


STRIKES: dict[str, Callable[[Chaos], int]] = {
    "rank killed": kill_rank,
    "rank stopped": stop_rank,
    "link cut": cut_link,
    "host killed": kill_host,
    "supervisor killed": kill_supervisor,
    "disk full": fill_disk,
    "stale lock": plant_lock,
    "port taken": take_port,
}


def losses_of(run: Path) -> dict[int, float]:
    """Training loss by step, of a step that was done twice the later; a line that a kill cut short is skipped."""
    losses = {}
    path = run / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError):
            record = json.loads(line)
            if record["kind"] == "train":
                losses[record["step"]] = record["loss"]
    return losses


def print_head() -> None:
    print(
        f"{'':>3} {'fault':<17} {'moment':<8} {'host':<6} {'hosts':<5} {'ds':<10} {'way':<14} {'step':>4} "
        f"{'noticed':>7} {'training again':>14} {'total':>6}  ends"
    )


def print_row(fault: Fault) -> None:
    noticed = "-" if fault.noticed_after_s is None else f"{fault.noticed_after_s:.1f} s"
    again = "-" if fault.training_again_after_s is None else f"{fault.training_again_after_s:.1f} s"
    hosts = f"{fault.num_hosts}->{fault.hosts_at_the_end}"
    print(
        f"{fault.number:>3} {fault.kind:<17} {fault.moment:<8} {fault.host:<6} {hosts:<5} {fault.ds_config:<10} "
        f"{fault.launcher + '+' + fault.starter:<14} {fault.at_step or '-':>4} {noticed:>7} {again:>14} "
        f"{fault.total_s:5.1f} s  {', '.join(fault.ends)}; {fault.verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
