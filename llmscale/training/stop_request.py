"""Connect a rank with the processes around it: requests to stop, and peers that are lost. By Linux' /proc, no torch.

Requests to stop are signals, and the end of the launcher that started this rank: nobody forwards signals any more, and
the ranks of a run that was meant to end would train on. Only launchers count, recognised by their command lines: a
shell, `nohup`, tmux or ssh that ends leaves a run alone.

A rank that is killed breaks the connections of all others, whose libraries name an address at best. Under any launcher
the ranks of a host are processes of one job, and the launcher's children: who is missing, and how a child ended that
nobody has waited for yet, is in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil

from llmscale.engine.launcher_variables import is_requeued
from llmscale.error_handling import describe_death
from llmscale.errors import MachineError
from llmscale.untrusted.interpreter import RUN_MODULE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: Set by `llmscale train` for its ranks: its process id. A rank whose parent is another process has lost it already.
LAUNCHER_VARIABLE = "LLMSCALE_LAUNCHER"
#: Set by `llmscale launch` for its ranks: the name of the launch, which all of its attempts share.
LAUNCH_VARIABLE = "LLMSCALE_LAUNCH"
#: By which `llmscale launch` passes Ctrl-C and the like on: a second SIGINT would end the ranks at once.
LAUNCH_STOPS = signal.SIGUSR1
_COMMANDS = frozenset(("deepspeed", "ds", "torchrun", "accelerate", "llmscale"))
#: Modules that run these commands, or are run by them -> the name to show.
_MODULES = {
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed.launcher.launch",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "llmscale": "llmscale",
    "llmscale.cli.main": "llmscale",
}
#: torchrun's default of --rdzv-id.
_NO_RUN_ID = "none"
_SLURM_JOB = "Slurm job "
#: Exit status of a rank that has saved and wants to be started again: EX_TEMPFAIL.
EXIT_RESTART = 75
_LAUNCHER_CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1
#: Loaded before a fork: `end_with_parent` is also called after one.
_LIBC = ctypes.CDLL(None)
#: Asked to stop during start-up, a rank that reaches no step boundary in this time exits. Rank 0 is last: the others'
#: connections to it would break, with long messages.
_START_GRACE_S = 2.0
_MAIN_RANK_LATER_S = 0.5
#: A rank installs its handlers in its first tenth of a second; on a busy machine, later.
_HANDLERS_PATIENCE_S = 10.0
_HANDLERS_CHECK_S = 0.05


#: Time after a second Ctrl-C in which a third one ends the run without a save.
_ANSWER_S = 5.0
#: Parts of messages of gloo, NCCL, torch's store and the kernel about a peer that has gone or does not answer.
_PEER_GONE = (
    "connection closed",
    "closed by peer",
    "connection reset",
    "reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "recvvalue failed",
    "sendbytes failed",
    "failed to recv",
    "socket timeout",
    "wait timeout",
    "timed out waiting",
    "remote process exited",
    "nccl communicator was aborted",
    "no route to host",
    "its connections broke",
)
#: torch's errors of process groups and stores, by name: this module imports no torch.
_CLASSES = frozenset(("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"))
#: Errors of these classes that say nothing about a peer.
_OWN_FAULTS = ("cuda error", "invalid usage", "invalid argument")
#: Time in which a rank that ends is looked for: its data workers, which look like it, end within a second. All
#: surviving ranks stay that long, so that none of them counts as missing.
_LOOK_S = 2.0
_LOOK_EVERY_S = 0.02
_MAX_REASON = 200


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask for a save and an end: STOP_SIGNALS, and SIGHUP unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [*STOP_SIGNALS, *([] if is_ignored else [signal.SIGHUP])]


def _name_of_request(number: int) -> str:
    """Return the name of a signal that asks for a stop, or of the launch that sent it for one of its own."""
    if number == LAUNCH_STOPS and LAUNCH_VARIABLE in os.environ:
        return "a request of `llmscale launch`"
    return signal.Signals(number).name


class Interrupts:
    """Counts Ctrl-C: the first asks for a save, the second is a question, and a third within _ANSWER_S the answer."""

    def __init__(self) -> None:
        self._count = 0
        self._asked_s = 0.0

    def add(self) -> bool:
        """Count one more, and return whether the run is to end at once."""
        now = time.monotonic()
        if self._count == 2 and now - self._asked_s > _ANSWER_S:
            self._count = 2
        else:
            self._count = self._count + 1
        self._asked_s = now
        return self._count > 2

    def answer(self) -> None:
        """Print what the last Ctrl-C does. Not by print, which the main thread may be inside of."""
        line = "saving after this step; Ctrl-C again stops without saving"
        if self._count == 2:
            line = f"Ctrl-C within {_ANSWER_S:g} s stops without saving: the steps since the last checkpoint are lost"
        with contextlib.suppress(OSError):
            # A terminal has echoed ^C.
            os.write(1, f"{os.linesep * os.isatty(1)}{line}\n".encode())


class StopOfRank(NamedTuple):
    """A rank's view of a stop."""

    reason: str | None
    """The first request that it received; None if another rank did."""
    node: str
    """torchrun's number of its node; empty under other launchers."""


def is_left_by_others(stops: Sequence[StopOfRank], variables: Mapping[str, str]) -> bool:
    """Return whether the ranks stop for another node alone, and torchrun can continue without it.

    torchrun takes status 0 for a finished run. Without a rendezvous it cannot continue without a node.
    """
    node = variables.get("GROUP_RANK", "")
    restarts = variables.get("TORCHELASTIC_MAX_RESTARTS", "0")
    is_elastic = restarts != "0" and variables.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID) != _NO_RUN_ID
    return is_elastic and not any(stop.reason for stop in stops if stop.node == node)


@dataclass
class StopRequest:
    """Records requests to stop; the loop reads them at step boundaries, where all ranks can agree.

    A handler that acted at once could interrupt a collective and leave the other ranks waiting in it. Before the first
    step there is nothing to save: then the process ends by itself after a short grace period.
    """

    received: list[str] = field(default_factory=list)
    """Reasons in order: names of signals, or the launcher that ended."""
    before_early_end: list[Callable[[], None]] = field(default_factory=list)
    """Called in another thread before the process ends during start-up."""
    before_sudden_end: list[Callable[[], None]] = field(default_factory=list)
    """Called in another thread before a third SIGINT, in start-up a second, ends the process."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starting: bool = True
    _early_reason: str | None = None

    def install(self) -> None:
        """Record SIGTERM, SIGINT, SIGUSR1, and SIGHUP unless nohup ignores it; answer SIGINT at once."""
        numbers = stop_signals()
        self._listen(numbers)
        for number in numbers:
            signal.signal(number, self._note)

    def watch_launchers(self) -> None:
        """Treat the end of a launcher above this process as a request to stop."""
        launchers = find_launchers()

        def watch() -> None:
            while True:
                for launcher in launchers:
                    if launcher.is_gone:
                        self.received.append(f"the end of its launcher ({launcher.name}, process {launcher.pid})")
                        self._end_early(self.received[0])
                        return
                time.sleep(_LAUNCHER_CHECK_S)

        if launchers:
            threading.Thread(target=watch, name="launchers", daemon=True).start()

    def of_this_rank(self) -> StopOfRank:
        """Return what this rank knows of a stop."""
        return StopOfRank(next(iter(self.received), None), os.environ.get("GROUP_RANK", ""))

    def leave_start_up(self) -> None:
        """Leave the end of the process to the loop: there is something to save, or all ranks agreed to stop."""
        with self._lock:
            self._starting = False

    @property
    def ends_early(self) -> bool:
        """True if start-up was asked to stop: any failure now is a consequence of ranks that end."""
        return self._starting and self._early_reason is not None

    def end_now(self) -> None:
        """End a start-up that was asked to stop, with status 0; return if start-up is over."""
        with self._lock:
            if not self._starting:
                return
            line = f"stopped by {self._early_reason} before the first step of this start: nothing new to save\n"
            actions: list[Callable[[], object]] = [*self.before_early_end]
            if os.environ.get("RANK", "0") == "0":
                # Not print: the main thread may be inside one.
                actions.append(partial(os.write, 1, line.encode()))
            for action in actions:
                with contextlib.suppress(OSError):
                    action()
            os._exit(0)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(_name_of_request(number))

    def _listen(self, numbers: list[signal.Signals]) -> None:
        """Watch for signals in a thread.

        Python runs no handler while the main thread waits in a collective or for a missing rank, and that is when
        somebody presses Ctrl-C twice.
        """
        arrivals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        # A forked data worker would write its own signals into the same pipe.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

        def listen() -> None:
            interrupts = Interrupts()
            while byte := os.read(arrivals, 1):  # one byte per signal, its number
                if byte[0] == signal.SIGINT:
                    self._interrupt(interrupts)
                if byte[0] in numbers:
                    self._end_early(_name_of_request(byte[0]))

        threading.Thread(target=listen, name="signals", daemon=True).start()

    def _interrupt(self, interrupts: Interrupts) -> None:
        """Answer a Ctrl-C on rank 0, or end this process at once."""
        if interrupts.add() or self.ends_early:
            with contextlib.suppress(Exception):
                for action in self.before_sudden_end:
                    action()
            # Shells report a signal as 128 + its number.
            os._exit(128 + signal.SIGINT)
        if not self._starting and os.environ.get("RANK", "0") == "0":
            interrupts.answer()

    def _end_early(self, why: str) -> None:
        """Begin to end, unless training has begun."""
        if self._early_reason is not None or not self._starting:
            return
        self._early_reason = why
        # In a thread: a second SIGINT must still be noticed.
        threading.Thread(target=self._end_together, name="early end", daemon=True).start()

    def _end_together(self) -> None:
        # A rank that was not told would wait for this one.
        _tell_other_ranks()
        time.sleep(_START_GRACE_S + (_MAIN_RANK_LATER_S if os.environ.get("RANK", "0") == "0" else 0.0))
        self.end_now()


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when the parent's thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def _tell_other_ranks() -> None:
    """Send SIGTERM to the other ranks of this job on this host, each once it has installed its handlers.

    Before that it would die of the signal, and the job would count as failed.
    """
    signalled: set[int] = set()
    deadline = time.monotonic() + _HANDLERS_PATIENCE_S
    own_rank = int(os.environ.get("RANK", "0"))
    while os.environ.get("WORLD_SIZE", "1") != "1":
        others = {pid for pid, rank in find_ranks().items() if rank != own_rank} - signalled
        late = time.monotonic() > deadline
        for pid in others:
            if late or _catches_sigterm(pid):
                signalled.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        if late or others <= signalled:
            return
        time.sleep(_HANDLERS_CHECK_S)


def find_ranks() -> dict[int, int]:
    """Return the rank of each of this job's living processes on this host: those with the same rendezvous."""
    ours = {f"{name}={os.environ.get(name, '')}".encode() for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")}
    ranks_by_pid = {}
    for pid in psutil.pids():
        variables = set(_read_list(pid, "environ"))
        ranks = [word[5:] for word in variables if word.startswith(b"RANK=") and word[5:].isdigit()]
        if ours <= variables and ranks:
            ranks_by_pid[pid] = int(ranks[0])
    return ranks_by_pid


def _catches_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, or has ended."""
    caught = b"".join(_read_list(pid, "status")).partition(b"SigCgt:")[2].split()
    return not caught or bool(int(caught[0], 16) >> (signal.SIGTERM - 1) & 1)


@dataclass(frozen=True)
class Launcher:
    """One process above this one."""

    pid: int
    name: str
    started: str
    """Start time as the kernel reports it: process ids are reused. Empty for a process that ended before we looked."""

    @property
    def is_gone(self) -> bool:
        """True if it has ended, even if its parent has not noticed."""
        stat = read_stat(self.pid)
        return stat is None or stat.started != self.started or stat.state in "ZX"


def find_launchers() -> list[Launcher]:
    """Return the launchers above this rank, its parent first."""
    named = os.environ.get(LAUNCHER_VARIABLE, "")
    if named.isdigit():
        if int(named) == os.getppid():
            stat = read_stat(int(named))
        else:
            stat = None
        return [Launcher(int(named), "llmscale train", stat.started if stat else "")]
    chain: list[Launcher] = []
    pid = os.getppid()
    while pid > 0 and (stat := read_stat(pid)) is not None:
        name = launcher_name([os.fsdecode(word) for word in _read_list(pid, "cmdline")[:-1]])
        if name is not None:
            chain.append(Launcher(pid, name, stat.started))
        elif chain or f"RANK={os.environ.get('RANK', '')}".encode() not in _read_list(pid, "environ"):
            # Not a wrapper with the rank's environment either, such as a shell script that binds cores.
            break
        pid = stat.parent
    return chain


def launch_names(variables: Mapping[str, str]) -> list[str]:
    """Return the names of this launch by torchrun, Slurm and `llmscale launch`, which all of its starts share.

    torchrun's restart count differs between nodes, and stays 0 when ranks restart for a node that comes or goes.
    """
    if "SLURM_JOB_ID" in variables:
        names = [f"{_SLURM_JOB}{variables['SLURM_JOB_ID']}"]
    else:
        names = []
    names += [variables[LAUNCH_VARIABLE]] if LAUNCH_VARIABLE in variables else []
    run_id = variables.get("TORCHELASTIC_RUN_ID")
    if run_id not in (None, "", _NO_RUN_ID):
        return [*names, f"torchrun --rdzv-id {run_id}"]
    # The default is the same for all launches, but without a rendezvous the agent of a host never changes.
    if run_id is None:
        agents = []
    else:
        agents = find_launchers()[:1]
    return [*names, *(f"torchrun {agent.pid} of {platform.node()}, started {agent.started}" for agent in agents)]


def repeating_launches(variables: Mapping[str, str]) -> list[str]:
    """Return the names of a launch that may have started the same command before; a Slurm job only if requeued."""
    return [name for name in launch_names(variables) if is_requeued(variables) or not name.startswith(_SLURM_JOB)]


def launcher_name(arguments: Sequence[str]) -> str | None:
    """Return the name of the launcher that a command line runs, or None."""
    program, *words = arguments or [""]
    name = os.path.basename(program)
    if not name.startswith("python"):
        return name if name in _COMMANDS else None
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    if words[:1] == ["-m"] or words[:2] == ["-c", RUN_MODULE]:
        return _MODULES.get([*words, ""][2 if words[0] == "-c" else 1])
    if not words or words[0] == "-c":
        return None
    # An installed command, or the file of a module.
    if (name := os.path.basename(words[0])) in _COMMANDS:
        return name
    dotted = words[0].removesuffix(".py").replace("/", ".")
    launchers = (name for module, name in _MODULES.items() if "." in module and dotted.endswith(f".{module}"))
    return next(launchers, None)


@dataclass(frozen=True)
class Stat:
    """A process as the kernel shows it."""

    state: str
    """One letter: T stopped, Z or X ended."""
    parent: int
    started: str
    exit_code: int
    """Status as of waitpid; 0 while it runs."""


def read_stat(pid: int) -> Stat | None:
    """Return the state of a process; None without one."""
    # The command comes first, in parentheses, and may itself contain some.
    words = b"".join(_read_list(pid, "stat")).decode(errors="replace").rpartition(")")[2].split()
    if words:
        return Stat(words[0], int(words[1]), words[19], int(words[49]))
    return None


def _read_list(pid: int, name: str) -> list[bytes]:
    """Return a file of a process in /proc, cut at its NULs; nothing of another user's, or of one that ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:
        return []


class LostPeer(MachineError):
    """Another rank has ended, or does not answer."""


def names_lost_peer(failure: str) -> bool:
    """Return whether the text of an error is about a peer that has gone or does not answer."""
    return any(part in failure.lower() for part in _PEER_GONE)


def explain_lost_peer(error: BaseException) -> LostPeer | None:
    """Return the error for the user if the connection to another rank broke, else None. Takes `_LOOK_S`."""
    reason = _reason_of(error)
    cause = error.__cause__ or error.__context__
    while reason is None and cause is not None:
        reason = _reason_of(cause)
        cause = cause.__cause__ or cause.__context__
    if reason is None or os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return None
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    first = int(os.environ["RANK"]) - int(os.environ.get("LOCAL_RANK", "0"))
    expected = range(first, first + count)
    killed: dict[int, int] = {}
    living = set(find_ranks().values())
    deadline = time.monotonic() + _LOOK_S
    while time.monotonic() < deadline:
        killed |= _killed_children(os.getppid())
        if living.issuperset(expected):
            living = set(find_ranks().values())
        time.sleep(_LOOK_EVERY_S)
    if missing := [rank for rank in expected if rank not in living]:
        words = _describe_missing(missing, killed)
    else:
        words = _describe_silent(reason, is_one_host=count == int(os.environ["WORLD_SIZE"]))
    lost = LostPeer(f"{words} ({reason}). The same command continues from the last checkpoint.")
    # The first rank of the host reports it, if it is there.
    lost.is_on_every_rank = first in living
    return lost


def _describe_missing(ranks: Sequence[int], killed: Mapping[int, int]) -> str:
    """Describe ranks of this host that have gone. `killed`: signals by which the launcher's children ended."""
    if len(ranks) == len(killed) == 1:
        ((process, number),) = killed.items()
        return f"rank {ranks[0]} (process {process}) {describe_death(number)}, and its connections broke"
    deaths = [f"process {process} {describe_death(number)}" for process, number in killed.items()]
    why = "; ".join(deaths) or "its own error, or its launcher's report, says why: exit code -9 is SIGKILL"
    numbers = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{numbers} on this host ended, and its connections broke; {why}"


def _describe_silent(reason: str, *, is_one_host: bool) -> str:
    """Describe a rank that does not answer, while all of this host live."""
    for process, rank in find_ranks().items():
        if (stat := read_stat(process)) and stat.state == "T":
            return f"rank {rank} (process {process}) is stopped: `kill -CONT {process}` continues it"
    if is_one_host:
        return "a rank does not answer, and all of them still run"
    address = re.search(r"\d+\.\d+\.\d+\.\d+", reason)
    if address:
        where = f" ({address.group()})"
    else:
        where = ""
    return (
        f"a rank on another host{where} ended or cannot be reached, and its connections broke; that host's output "
        "says why, and `llmscale doctor --hostfile FILE` checks the network"
    )


def _reason_of(error: BaseException) -> str | None:
    """Return the text of an error about a peer without its place in torch's source, or None."""
    text = " ".join(str(error).split())
    is_of_ranks = any(kind.__name__ in _CLASSES for kind in type(error).__mro__)
    if is_of_ranks and not any(fault in text.lower() for fault in _OWN_FAULTS):
        pass
    elif not isinstance(error, RuntimeError) or not names_lost_peer(text):
        return None
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\] ", "", text)
    return re.split(r"\. This is typically|[.,]? ?Exception raised from", text)[0][:_MAX_REASON]


def _killed_children(parent: int) -> dict[int, int]:
    """Return the signals by which children of a process ended that it has not waited for, by process."""
    signals = {}
    for pid in psutil.pids():
        stat = read_stat(pid)
        if stat and stat.parent == parent and stat.state in "ZX" and stat.exit_code & 0x7F:
            signals[pid] = stat.exit_code & 0x7F
    return signals
