"""Processes of the ranks on one host: start them, pass signals on, and leave nothing running. Linux only.

`llmscale train` and every host of `llmscale launch` start their ranks here, as DeepSpeed's launcher would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llmscale.cluster.hosts import run_command, search_path
from llmscale.error_handling import count_oom_kills, describe_death
from llmscale.training.live_view import GIVE_BACK
from llmscale.training.stop_request import (
    LAUNCHER_VARIABLE,
    STOP_SIGNALS,
    Interrupts,
    read_stat,
    stop_signals,
)
from llmscale.training.watchdog import REPORTS_VARIABLE, STACKS_SIGNAL
from llmscale.untrusted.interpreter import code_command
from llmscale.untrusted.paths import in_home

# ---------------------------------------------------------------- processes by number, from /proc

_PR_SET_CHILD_SUBREAPER = 36
#: Time limit for SIGKILL to take effect.
_KILL_S = 5.0
#: CPU quota of this container in cgroup v2: microseconds of processor time, or "max", per period.
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Time limit of torch's import and its look at the GPUs.
_TORCH_S = 300.0
#: A younger lock that nobody here holds may belong to a build on another host.
STALE_LOCK_S = 120.0
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
#: One folder per GPU, named after its PCI address, in the order of nvidia-smi's numbers.
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
#: Variables by which users bind threads themselves. OMP_PROC_BIND=false leaves ranks unbound, too.
_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "SLURM_CPU_BIND")
#: Time that the other ranks have to report their errors after one rank has failed.
_LAST_ERRORS_S = 5.0
_TICK_S = 0.5
#: Signals that are answered by whoever runs the ranks. Every thread of it must block them.
RANK_SIGNALS = frozenset({*STOP_SIGNALS, STACKS_SIGNAL, signal.SIGCHLD})


def adopt_orphans() -> None:
    """Make every descendant whose parent dies a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process; "" if it does not exist.

    R, S and D run or wait, T is stopped, Z has ended and is not reaped.
    """
    stat = read_stat(pid)
    return stat.state if stat else ""


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, parents first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def kill_descendants(pid: int) -> None:
    """Kill every process below `pid`, repeatedly until none is left."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        alive = [child for child in descendants(pid) if process_state(child) not in ("", "Z")]
        if not alive:
            return
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


# ---------------------------------------------------------------- resources of this host


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


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi describes it. Sizes in bytes."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    driver: str


def list_gpus(timeout_s: float = 30.0) -> tuple[list[Gpu], str | None]:
    """Return the GPUs of this host, without torch, none without nvidia-smi; and its error if it fails."""
    if shutil.which("nvidia-smi") is None:
        return [], None
    fields = "index,name,memory.total,memory.used,driver_version"
    done = run_command(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], timeout_s)
    if done.returncode:
        return [], done.describe()
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [
        Gpu(int(index), name, _mebibytes(total), _mebibytes(used), driver)
        for index, name, total, used, driver in (row for row in rows if len(row) == fields.count(",") + 1)
    ], None


def count_gpus() -> int:
    """Return the number of GPUs that ranks on this host may use: those in CUDA_VISIBLE_DEVICES, else all."""
    visible = visible_gpus(os.environ)
    if visible is not None:
        return len(visible)
    if gpus := list_gpus()[0]:
        return len(gpus)
    if not os.path.exists("/dev/kfd"):
        return 0
    # AMD's are counted by torch, in another process.
    done = run_command(code_command("import torch; print(torch.cuda.device_count())"), _TORCH_S)
    if done.stdout.strip().isdecimal():
        return int(done.stdout)
    return 0


def _mebibytes(text: str) -> int:
    """Return the bytes of a number of MiB; 0 for `[N/A]`."""
    if text.isdigit():
        return int(text) * 2**20
    return 0


def count_cpus() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


# ---------------------------------------------------------------- locks of builds that were killed


def remove_stale_locks(since_s: float = float("inf")) -> list[str]:
    """Remove locks of torch's builds of extensions that no process of this host holds, and return their paths.

    They must be old, or not older than `since_s` (Unix time), when processes began that have ended now.
    """
    removed = []
    # A folder with one subfolder per Python and CUDA version, unless a variable names it.
    cache = in_home(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
        with contextlib.suppress(FileNotFoundError):  # the build has ended in between
            made_s = path.stat().st_mtime
            if (time.time() - made_s > STALE_LOCK_S or made_s >= since_s) and not _is_held(path):
                path.unlink()
                removed.append(str(path))
    return removed


def _is_held(lock: Path) -> bool:
    """Return whether a process of this host has the file open, as torch does while it builds."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if any(file.path == os.path.realpath(lock) for file in process.open_files()):
                return True
    return False


# ---------------------------------------------------------------- cores of each rank


def binding_variable(variables: Mapping[str, str]) -> str | None:
    """Return the variable by which the user, or Slurm, has bound threads to cores already."""
    # `llmscale launch` gives srun --cpu-bind=none.
    is_free = "none" in variables.get("SLURM_CPU_BIND", "none").split(",")
    names = _BINDING_VARIABLES[:-1] if is_free else _BINDING_VARIABLES
    return next((name for name in names if variables.get(name)), None)


def allowed_cpus() -> dict[int, int]:
    """Return the NUMA node of each CPU that this process may use, ordered by node and physical core."""
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in _NODES.glob("node[0-9]*")
        for cpu in _read_cpus(folder / "cpulist")
    }

    def place(cpu: int) -> tuple[int, int, int]:
        threads_of_core = _read_cpus(_CPUS / f"cpu{cpu}/topology/thread_siblings_list")
        return nodes.get(cpu, 0), min(threads_of_core, default=cpu), cpu

    return {cpu: nodes.get(cpu, 0) for cpu in sorted(os.sched_getaffinity(0), key=place)}


def _read_cpus(path: Path) -> list[int]:
    """Return the CPUs of a list such as 0-3,8; none where the kernel has no such file."""
    cpus: list[int] = []
    with contextlib.suppress(OSError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1) if first else ()
    return cpus


def gpu_nodes(gpus: Sequence[str]) -> list[int]:
    """Return the NUMA node of each GPU, given by number or UUID; -1 where the kernel does not know it."""
    addresses = sorted(folder.name for folder in _NVIDIA_GPUS.glob("*:*"))

    def node(gpu: str) -> int:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            is_named = (a for a in addresses if gpu in (_NVIDIA_GPUS / a / "information").read_text())
            if gpu.isdigit() and int(gpu) < len(addresses):
                address = addresses[int(gpu)]
            else:
                address = next(is_named)
            return int((_PCI_DEVICES / address.lower() / "numa_node").read_text())
        return -1

    return [node(gpu) for gpu in gpus]


def divide_cpus(cpus: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Return the CPUs of each rank, consecutive ones of `cpus`; `nodes` are those of the ranks' GPUs.

    Shares are equal, so that no core is idle and no rank is late. Ranks of one node are neighbours: with as many
    GPUs at every node, each rank is at its own.
    """
    num_ranks = len(nodes)
    shares: list[list[int]] = [[] for _ in nodes]
    for place, rank in enumerate(sorted(range(num_ranks), key=lambda rank: nodes[rank])):
        shares[rank] = list(cpus[place * len(cpus) // num_ranks : (place + 1) * len(cpus) // num_ranks])
    return shares


def bind_ranks(variables: Mapping[str, str], num_ranks: int) -> list[list[int]]:
    """Return the CPUs to bind each rank of this host to; none to bind no rank.

    These are a single rank, ranks without a core each, ranks that are bound already, and those of a host without GPUs
    whose memory is one node. What taskset, numactl or a container allows is divided.
    """
    cpus = allowed_cpus()
    # Nothing is nearer there, and on a busy host bound ranks cannot evade other programs: in five pairs of runs on two
    # busy cores, steps took 0.8 to 1.7 times as long.
    gains = len(set(cpus.values())) > 1 or _NVIDIA_GPUS.is_dir()
    if not gains or num_ranks < 2 or len(cpus) < num_ranks or binding_variable(variables):
        return []
    gpus = visible_gpus(variables)
    nodes = gpu_nodes([str(rank) for rank in range(num_ranks)] if gpus is None else gpus[:num_ranks])
    return divide_cpus(list(cpus), [*nodes, *[-1] * (num_ranks - len(nodes))])


# ---------------------------------------------------------------- all ranks of a run on this machine


def rank_environment(
    variables: Mapping[str, str], ranks: Sequence[int], meeting: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the variables of this host's ranks: those of DeepSpeed's launcher, and threads that share its cores.

    `meeting` has MASTER_ADDR, MASTER_PORT and WORLD_SIZE; on several hosts CROSS_RANK and CROSS_SIZE, too.
    """
    gpus = visible_gpus(variables)
    count = len(ranks)
    shared = {
        **variables,
        "PYTHONPATH": search_path(variables.get("PYTHONPATH")),
        "LOCAL_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)) if gpus is None else gpus[:count]),
        LAUNCHER_VARIABLE: str(os.getpid()),
        **meeting,
    }
    if count > 1:
        # torch would give every rank all cores.
        shared.setdefault("OMP_NUM_THREADS", str(max(1, count_cpus() // count)))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(ranks)]


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
    outputs: Sequence[int] = ()
    """Descriptor of each rank's output, closed here once the ranks have it; none: this process's own."""
    reports: int | None = None
    """Descriptor that ranks report their progress to, closed here likewise. Such ranks are killed with this process."""
    note_end: Callable[[int, int], None] = lambda _number, _code: None
    """Called with the number and the return code of each rank that ends by itself."""
    why_ended_here: Callable[[], str] = str
    """Returns why this process itself has killed the ranks; empty if it has not."""
    oom_kills_before: int | None = field(default_factory=count_oom_kills)
    """Processes that the kernel had killed for lack of memory before."""

    def run(self) -> int:
        """Wait until all ranks have ended; return their exit status, or 128 + n if signal n killed one first."""
        adopt_orphans()
        handled = {*RANK_SIGNALS, *stop_signals()}
        # The ranks inherit the mask: stop signals are blocked until a rank can handle them, and nothing else.
        signal.pthread_sigmask(signal.SIG_SETMASK, handled - {STACKS_SIGNAL, signal.SIGCHLD})
        # Blocked signals wait for sigtimedwait, which does not take ignored ones.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        cpus = bind_ranks(self.environments[0], len(self.environments))
        ranks = [self._start(number, cpus) for number in range(len(self.environments))]
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        for descriptor in (*self.outputs, *([] if self.reports is None else [self.reports])):
            os.close(descriptor)
        try:
            return self._follow(ranks, handled)
        finally:
            # Also processes that ranks leave behind: data workers, compilers.
            kill_descendants(os.getpid())
            for rank in ranks:
                rank.wait()
            # Reaps what this process has adopted.
            psutil.wait_procs(psutil.Process().children(), timeout=0)

    def _start(self, number: int, cpus: Sequence[Sequence[int]]) -> subprocess.Popen[bytes]:
        """Start a rank, which inherits the affinity of this thread."""
        if self.reports is None:
            reports = {}
        else:
            reports = {REPORTS_VARIABLE: str(self.reports)}
        output = self.outputs[number] if self.outputs else None
        own_cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus[number] if cpus else own_cpus)
        try:
            return subprocess.Popen(
                self.command,
                env={**self.environments[number], **reports},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=() if self.reports is None else (self.reports,),
                # In a separate session, Ctrl-C in the terminal reaches this process alone, which passes it on once.
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, own_cpus)

    def _follow(self, ranks: Sequence[subprocess.Popen[bytes]], handled: set[signal.Signals]) -> int:
        ended: list[int] = []
        deadline = float("inf")
        interrupts = Interrupts()
        while True:
            received = signal.sigtimedwait(handled, _TICK_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                # The ranks count and answer, too.
                if received.si_signo == signal.SIGINT and interrupts.add():
                    return 128 + signal.SIGINT
                for rank in ranks:
                    if rank.poll() is None:
                        rank.send_signal(received.si_signo)
            for number, rank in enumerate(ranks):
                if number not in ended and (code := rank.poll()) is not None:
                    ended.append(number)
                    self.note_end(number, code)
            failed = [(number, ranks[number]) for number in ended if ranks[number].returncode]
            if failed and deadline == float("inf"):
                deadline = time.monotonic() + _LAST_ERRORS_S
            if len(ended) == len(ranks) or time.monotonic() > deadline:
                return self._exit_status(failed)

    def _exit_status(self, failed: Sequence[tuple[int, subprocess.Popen[bytes]]]) -> int:
        """Return the exit status for the ranks that failed by themselves, in the order in which they were seen."""
        # A killed rank breaks the connections of the others, which then end with errors of their own.
        for number, rank in failed:
            if rank.returncode < 0:
                if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
                    # A killed rank's live view leaves the terminal's scroll area reduced.
                    print(GIVE_BACK, end="", flush=True)
                who = f"rank {self.environments[number]['RANK']} (process {rank.pid})"
                death = f"{who} {describe_death(-rank.returncode, self.oom_kills_before)}; the other ranks were ended."
                why = self.why_ended_here()
                self.show(f"the ranks on this host were ended: {why}." if why else death)
                return 128 - rank.returncode
        # One rank reports the user's mistakes for all.
        codes = [rank.returncode for _, rank in failed]
        if 2 in codes:
            return 2
        return next(iter(codes), 0)
