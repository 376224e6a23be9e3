"""All ranks of a run on this machine: start them as DeepSpeed's launcher would, pass signals on, end them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmscale.cluster.environment import search_path
from llmscale.cluster.launch.process_tree import adopt_orphans, kill_descendants
from llmscale.training.bottom_rows import GIVE_BACK
from llmscale.training.heartbeat import STACKS_SIGNAL
from llmscale.training.stop_request import LAUNCHER_VARIABLE, STOP_SIGNALS

#: After one rank has failed, how long the others may take to say what they know of it.
_LAST_WORDS_S = 5.0
_TICK_S = 0.5
#: The quota of this container, as cgroup v2 shows it: microseconds of processor time, or "max", per period.
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def rank_environment(variables: Mapping[str, str], num_ranks: int, port: int, num_cpus: int) -> list[dict[str, str]]:
    """Each rank's variables: those of DeepSpeed's launcher, and threads so that the ranks share `num_cpus` cores."""
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


def visible_gpus(variables: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by number or name; None when it says nothing."""
    said = variables.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return None
    # As CUDA reads it: what follows an illegal number is not there either.
    names: list[str] = []
    for word in said.split(","):
        if not word.strip() or word.strip().startswith("-"):
            break
        names.append(word.strip())
    return names


def count_gpus() -> int:
    """GPUs of this machine, as the driver's own tool counts, without torch; 0 without one."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def count_cpus() -> int:
    """Cores that this process may use: by its affinity, and by its container's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


@dataclass
class LocalRanks:
    """Processes of one run; the calling thread must be the main one."""

    command: Sequence[str]
    """What every rank runs."""
    environments: Sequence[Mapping[str, str]]
    """One per rank."""
    show: Callable[[str], None]
    """Prints one line of an error."""

    def run(self) -> int:
        """Until all have ended; the exit status: the ranks' own, 128 + n when signal n killed one first."""
        adopt_orphans()
        heard = {*STOP_SIGNALS, STACKS_SIGNAL, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # or nohup has
            heard.add(signal.SIGHUP)
        # The ranks inherit the mask: what asks them to stop is blocked until they can answer, and nothing else.
        signal.pthread_sigmask(signal.SIG_BLOCK, heard - {STACKS_SIGNAL, signal.SIGCHLD})
        # Blocked signals wait for sigtimedwait, which takes none that is ignored.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        ranks = [self._start(environment) for environment in self.environments]
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        try:
            return self._follow(ranks, heard)
        finally:
            # Also what ranks have left behind: data workers, compilers.
            kill_descendants(os.getpid())
            for rank in ranks:
                rank.wait()
            with contextlib.suppress(ChildProcessError):  # no more of them
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the terminal is for this process, which passes it on, once.
        return subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _follow(self, ranks: Sequence[subprocess.Popen[bytes]], heard: set[signal.Signals]) -> int:
        failed: list[int] = []
        deadline = float("inf")
        num_sigints = 0
        while True:
            news = signal.sigtimedwait(heard, _TICK_S)
            if news is not None and news.si_signo != signal.SIGCHLD:
                num_sigints += news.si_signo == signal.SIGINT
                if num_sigints == 2:
                    return 128 + signal.SIGINT
                for rank in ranks:
                    if rank.poll() is None:
                        rank.send_signal(news.si_signo)
            ended = [number for number, rank in enumerate(ranks) if rank.poll() is not None]
            failed += [number for number in ended if ranks[number].returncode and number not in failed]
            if failed and deadline == float("inf"):
                deadline = time.monotonic() + _LAST_WORDS_S
            if len(ended) == len(ranks) or time.monotonic() > deadline:
                return self._status([(number, ranks[number]) for number in failed])

    def _status(self, failed: Sequence[tuple[int, subprocess.Popen[bytes]]]) -> int:
        """Of the ranks that ended badly by themselves, in the order in which that was seen."""
        # A killed rank breaks the connections of the others, which then end with an error of their own.
        for number, rank in failed:
            if rank.returncode < 0:
                _mend_terminal()
                self.show(_describe_death(number, rank.pid, -rank.returncode))
                return 128 - rank.returncode
        # The user's mistakes are said by one rank for all.
        codes = [rank.returncode for _, rank in failed]
        return 2 if 2 in codes else next(iter(codes), 0)


def rank_command(script: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command of every rank; unbuffered, so that lines of several ranks come in order."""
    return [sys.executable, "-u", str(script), *arguments]


def _mend_terminal() -> None:
    """A rank that was killed could not give back the rows of its live view."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            os.write(sys.stdout.fileno(), GIVE_BACK.encode())


def _describe_death(rank: int, pid: int, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    cause = ""
    if number == signal.SIGKILL:
        cause = ", most likely by the kernel for lack of host memory (dmesg says so)"
    return f"rank {rank} (process {pid}) was killed by {name}{cause}; the others were ended."
