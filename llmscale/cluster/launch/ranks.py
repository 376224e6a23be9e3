"""Processes of the ranks on one host: start them, pass signals on, and leave nothing running. Linux only.

`LocalRanks` are the ranks of `llmscale train`, started as DeepSpeed's launcher would. `NodeRanks` are one host's ranks
of `llmscale launch`, started through DeepSpeed's launcher or torchrun.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmscale.cluster.extension_locks import HeldLocks
from llmscale.cluster.launch.protocol import Output, RankStatus, Stacks, Start
from llmscale.cluster.launch.rank_output import RankOutput
from llmscale.cluster.remote import search_path
from llmscale.training.live_view import GIVE_BACK
from llmscale.training.stop_request import (
    LAUNCHER_VARIABLE,
    STACKS_SIGNAL,
    STOP_SIGNALS,
    WATCH_VARIABLE,
    describe_death,
    heartbeat_path,
    output_path,
    stacks_path,
)
from llmscale.untrusted.interpreter import module_command

# ---------------------------------------------------------------- processes by number, from /proc

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
#: Time limit for SIGKILL to take effect.
_KILL_S = 5.0
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make every descendant whose parent dies a child of this process."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Ask this process to stop when its parent thread dies, as Popen's preexec_fn."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def become_launcher() -> None:
    """Prepare a launcher, as Popen's preexec_fn: it dies with its parent thread, and blocks the stop signals.

    Slurm sends those to every process of a job, and a launcher that took one would kill its ranks while they save. The
    ranks unblock them: `Heartbeat.install`.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process; "" if it does not exist.

    R, S and D run or wait, T is stopped, Z has ended and is not reaped.
    """
    try:
        # After the command in parentheses, which may itself hold some.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, parents first."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    """Return the children of every thread of a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += [int(word) for word in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    return found


def kill_descendants(pid: int) -> int:
    """Kill every process below `pid`, repeatedly until none is left, and return their number."""
    deadline, killed = time.monotonic() + _KILL_S, set()
    while time.monotonic() < deadline:
        alive = [child for child in descendants(pid) if process_state(child) not in ("", "Z")]
        if not alive:
            break
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        killed.update(alive)
        time.sleep(0.02)
    return len(killed)


# ---------------------------------------------------------------- resources of this host

#: CPU quota of this container in cgroup v2: microseconds of processor time, or "max", per period.
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def find_port(preferred: int | None) -> tuple[int, bool]:
    """Return a free TCP port of this host, and whether `preferred` was given and is in use.

    Nobody listens at a free port on any address. Another program may still take it before the ranks do: they fail at
    once, and the next attempt asks again.
    """
    if preferred is not None and is_free(preferred):
        return preferred, False
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1], preferred is not None


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` of all addresses, as torch's store does."""
    with socket.socket() as probe:
        # torch sets it too: connections that linger from an earlier attempt do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
        return True


def visible_gpus(variables: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, by number or name; None if it is not set."""
    value = variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    # CUDA ignores everything after an invalid entry.
    names: list[str] = []
    for word in value.split(","):
        if not word.strip() or word.strip().startswith("-"):
            break
        names.append(word.strip())
    return names


def count_gpus() -> int:
    """Return the number of GPUs from nvidia-smi, without torch; 0 without the tool."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def count_cpus() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


# ---------------------------------------------------------------- all ranks of a run on this machine

#: Time that the other ranks have to report their errors after one rank has failed.
_LAST_ERRORS_S = 5.0
_TICK_S = 0.5


def rank_environment(variables: Mapping[str, str], num_ranks: int, port: int, num_cpus: int) -> list[dict[str, str]]:
    """Return each rank's variables: those of DeepSpeed's launcher, and threads so that ranks share `num_cpus` cores."""
    gpus = visible_gpus(variables)
    shared = {
        **variables,
        "PYTHONPATH": search_path(variables.get("PYTHONPATH")),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_ranks)) if gpus is None else gpus[:num_ranks]),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    if num_ranks > 1:
        # torch would give every rank all cores.
        shared.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus // num_ranks)))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def rank_command(script: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command of every rank; unbuffered, so that lines of several ranks come in order."""
    return [sys.executable, "-u", str(script), *arguments]


@dataclass
class LocalRanks:
    """All ranks of a run on this machine. The calling thread must be the main one."""

    command: Sequence[str]
    """Command of every rank."""
    environments: Sequence[Mapping[str, str]]
    """Variables of each rank."""
    show: Callable[[str], None]
    """Prints one line of an error."""

    def run(self) -> int:
        """Wait until all ranks have ended; return their exit status, or 128 + n if signal n killed one first."""
        adopt_orphans()
        handled = {*STOP_SIGNALS, STACKS_SIGNAL, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            handled.add(signal.SIGHUP)
        # The ranks inherit the mask: stop signals are blocked until a rank can handle them, and nothing else.
        signal.pthread_sigmask(signal.SIG_BLOCK, handled - {STACKS_SIGNAL, signal.SIGCHLD})
        # Blocked signals wait for sigtimedwait, which does not take ignored ones.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        ranks = [self._start(environment) for environment in self.environments]
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            return self._follow(ranks, handled)
        finally:
            # Also processes that ranks leave behind: data workers, compilers.
            kill_descendants(os.getpid())
            for rank in ranks:
                rank.wait()
            with contextlib.suppress(ChildProcessError):  # all are reaped
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # In a separate session, Ctrl-C in the terminal reaches this process alone, which passes it on once.
        return subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _follow(self, ranks: Sequence[subprocess.Popen[bytes]], handled: set[signal.Signals]) -> int:
        failed: list[int] = []
        deadline = float("inf")
        num_sigints = 0
        while True:
            received = signal.sigtimedwait(handled, _TICK_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                num_sigints += received.si_signo == signal.SIGINT
                if num_sigints == 2:
                    return 128 + signal.SIGINT
                for rank in ranks:
                    if rank.poll() is None:
                        rank.send_signal(received.si_signo)
            ended = [number for number, rank in enumerate(ranks) if rank.poll() is not None]
            failed += [number for number in ended if ranks[number].returncode and number not in failed]
            if failed and deadline == float("inf"):
                deadline = time.monotonic() + _LAST_ERRORS_S
            if len(ended) == len(ranks) or time.monotonic() > deadline:
                return self._exit_status([(number, ranks[number]) for number in failed])

    def _exit_status(self, failed: Sequence[tuple[int, subprocess.Popen[bytes]]]) -> int:
        """Return the exit status for the ranks that failed by themselves, in the order in which they were seen."""
        # A killed rank breaks the connections of the others, which then end with errors of their own.
        for number, rank in failed:
            if rank.returncode < 0:
                _restore_terminal()
                death = describe_death(-rank.returncode)
                self.show(f"rank {number} (process {rank.pid}) {death}; the other ranks were ended.")
                return 128 - rank.returncode
        # One rank reports the user's mistakes for all.
        codes = [rank.returncode for _, rank in failed]
        return 2 if 2 in codes else next(iter(codes), 0)


def _restore_terminal() -> None:
    """Reset the terminal's scroll area, which a killed rank's live view leaves reduced."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            os.write(sys.stdout.fileno(), GIVE_BACK.encode())


# ---------------------------------------------------------------- the ranks of one host in an attempt

#: Launchers of one host's ranks: DeepSpeed's per-host launcher, or torchrun.
STARTERS = ("deepspeed", "torchrun")
#: Time that the launcher has to report how its ranks died.
_LAUNCHER_REPORT_S = 2.5
#: Time that a rank has to write its stacks.
_STACKS_WAIT_S = 2.0


class NodeRanks:
    """The launcher and the ranks of this host in one attempt."""

    def __init__(self, start: Start, environment: Mapping[str, str], folder: Path) -> None:
        """Start the launcher; `close` removes the watch folder `folder`. Raises OSError if it cannot be started."""
        self.ranks = start.ranks
        self._folder = folder
        self._output = RankOutput()
        logs = Path(start.log_folder)
        for rank in self.ranks:
            self._output.add(rank, self._make_pipe(rank), logs / f"rank-{rank:05d}.log")
        self._deferred: list[signal.Signals] = []
        self._locks = HeldLocks()
        self._launcher = subprocess.Popen(
            starter_command(start),
            env={**os.environ, **environment, WATCH_VARIABLE: str(self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=become_launcher,
        )
        assert self._launcher.stdout is not None
        launcher_log = logs / f"launcher-{start.hosts[start.node_rank]}.log"
        self._output.add(None, os.dup(self._launcher.stdout.fileno()), launcher_log)

    def _make_pipe(self, rank: int) -> int:
        path = output_path(self._folder, rank)
        os.mkfifo(path, 0o600)
        # Also open for writing, so that it neither ends between two writers nor blocks the first one.
        return os.open(path, os.O_RDWR)

    @property
    def launcher_code(self) -> int | None:
        """Return the launcher's exit status; negative for a signal, None while it runs.

        Leaves it unreaped, so that its number, which is its process group's too, cannot name another process.
        """
        if self._launcher.returncode is not None:
            return self._launcher.returncode
        ended = os.waitid(os.P_PID, self._launcher.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code != os.CLD_EXITED:
            return -ended.si_status
        # The launcher passes a signal on as an exit status of -9, which arrives as 247.
        return ended.si_status - 256 if ended.si_status >= 192 else ended.si_status

    def read_output(self, is_last: bool = False) -> list[Output]:
        """Return the lines since the last call, the newest ones of a flood; with `is_last` unfinished ones too."""
        return self._output.read(is_last)

    def statuses(self) -> list[RankStatus]:
        """Return the newest heartbeat of every rank that has given one."""
        found = []
        for rank in self.ranks:
            with contextlib.suppress(OSError, ValueError, KeyError):
                status = json.loads(heartbeat_path(self._folder, rank).read_text())
                state = process_state(status["pid"])
                found.append(RankStatus(rank=rank, alive=state not in ("", "Z"), state=state, **status))
        return found

    def note_locks(self) -> None:
        """Record the locks that starting ranks hold: extensions are built during the start."""
        self._locks.note(status.pid for status in self.statuses() if status.phase == "starting")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks, not to the launcher, which would end them. Late ranks get it once they run."""
        statuses = self.statuses()
        _kill_ranks(statuses, number)
        if len(statuses) < len(self.ranks):
            self._deferred.append(number)

    def deliver_deferred(self) -> None:
        """Send again the signals that came before every rank could take them; a second time does no harm."""
        if self._deferred and len(self.statuses()) == len(self.ranks):
            waiting, self._deferred = self._deferred, []
            for number in waiting:
                self.send_signal(number)

    def dump_stacks(self) -> list[Stacks]:
        """Return the stacks of every rank's threads. A stopped (state T) or dead rank cannot answer."""
        statuses = self.statuses()
        _kill_ranks(statuses, STACKS_SIGNAL)
        time.sleep(_STACKS_WAIT_S)
        stacks = []
        for status in statuses:
            text = ""
            with contextlib.suppress(OSError):
                text = stacks_path(self._folder, status.rank).read_text(errors="replace")
            stacks.append(Stacks(status.rank, status.state, text))
        return stacks

    def end(self) -> int | None:
        """Kill all processes of the attempt, and return the launcher's exit status.

        The ranks die first: the launcher then reports how the first of them ended.
        """
        had_ranks = kill_descendants(self._launcher.pid)
        deadline = time.monotonic() + _LAUNCHER_REPORT_S
        while had_ranks and self.launcher_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code = self.launcher_code
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
        # Processes that left the group are now children of this process, which adopts orphans.
        kill_descendants(os.getpid())
        self._locks.remove()
        self._launcher.wait()
        return code

    def close(self) -> None:
        """Remove the watch folder and close the logs."""
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill_ranks(statuses: Sequence[RankStatus], number: signal.Signals) -> None:
    for status in statuses:
        if status.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.pid, number)


def starter_command(start: Start) -> list[str]:
    """Return the command of host number `start.node_rank`."""
    program = [start.script, *start.arguments]
    if start.starter == "torchrun":
        # Without -- torchrun would take --run for an abbreviation of one of its own flags.
        return [
            *module_command("torch.distributed.run", f"--nnodes={len(start.hosts)}"),
            *(f"--node-rank={start.node_rank}", f"--nproc-per-node={start.ranks_per_host}", "--max-restarts=0"),
            *(f"--master-addr={start.master_addr}", f"--master-port={start.master_port}", "--"),
            *program,
        ]
    # The command that `deepspeed` starts on each host. `deepspeed` itself would return 0 when this was killed.
    world = {host: list(range(start.ranks_per_host)) for host in start.hosts}
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return [
        *module_command("deepspeed.launcher.launch", f"--world_info={encoded}", flags=["-u"]),
        *(f"--node_rank={start.node_rank}", f"--master_addr={start.master_addr}"),
        *(f"--master_port={start.master_port}", "--log_level=warning", *program),
    ]
