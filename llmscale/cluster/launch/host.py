"""One host's side of `llmscale launch`: `python -m llmscale.cluster.launch.host`, started through ssh or srun.

It starts the ranks of this host, and passes on what they print and report. It ends them, and itself, when the
connection closes or the launcher has been silent for too long. Both sides write one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmscale.cluster.extension_locks import HeldLocks, remove_stale_locks
from llmscale.cluster.launch.ranks import (
    LocalRanks,
    count_cpus,
    find_port,
    process_state,
    rank_command,
    rank_environment,
)
from llmscale.engine.network import source_address
from llmscale.files.resilient_stdout import ResilientWriter
from llmscale.training.stop_request import STOP_SIGNALS
from llmscale.training.watchdog import STACKS_SIGNAL
from llmscale.untrusted.paths import open_own

#: Begins every message to the launcher: a login shell may print a greeting into the same stream.
MARK = b"@llmscale "
#: Time limit for the launcher's first message.
_HELLO_S = 60.0
_TICK_S = 1.0
#: A pipe that can be written to takes as many bytes at once.
_CHUNK_BYTES = 4096
#: Time that the last output has to arrive.
_LAST_OUTPUT_S = 5.0
#: Size at which a log is renamed FILE.1, replacing the earlier one.
LOG_BYTES = 64 << 20
#: Length from which a line is shown in pieces.
_LINE_BYTES = 1 << 14


class Launcher:
    """The connection to the launcher."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self._read, self._write = read_descriptor, write_descriptor
        self.limit_s = _HELLO_S
        """Silence after which the launcher counts as gone."""
        self.is_gone = threading.Event()
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def next_order(self) -> dict[str, Any] | None:
        """Wait for an order; None if the launcher is gone."""
        return self._orders.get()

    def send(self, **message: object) -> None:
        """Send a message, unless the launcher is gone and nobody reads any more."""
        rest = MARK + json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while rest:
                if select.select([], [self._write], [], _TICK_S)[1]:
                    rest = rest[os.write(self._write, rest[:_CHUNK_BYTES]) :]
                elif self.is_gone.is_set():
                    return

    def _listen(self) -> None:
        _leave_signals_to_main_thread()
        try:
            self._take_orders()
        finally:
            self.is_gone.set()
            self._orders.put(None)

    def _take_orders(self) -> None:
        rest, heard_s = b"", time.monotonic()
        while time.monotonic() - heard_s < self.limit_s:
            if not select.select([self._read], [], [], _TICK_S)[0]:
                continue
            data = os.read(self._read, 1 << 16)
            if not data:
                return
            heard_s = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for order in (json.loads(line) for line in lines if line):
                if order == "stop":
                    # SIGUSR1: a second SIGINT would end the ranks at once.
                    os.kill(os.getpid(), signal.SIGUSR1)
                else:
                    self._orders.put(order)


def _leave_signals_to_main_thread() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, STACKS_SIGNAL, signal.SIGCHLD))


class RankLog:
    """A log file of limited size. A run must not die of its log."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0
        self._file = self._open()

    def write(self, data: bytes) -> None:
        """Append what the disk takes."""
        self._size += len(data)
        if self._size > LOG_BYTES:
            os.close(self._file.fileno())
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file, self._size = self._open(), len(data)
        self._file.write(data)

    def _open(self) -> ResilientWriter:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            print(f"WARNING: {self._path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            descriptor = os.open(os.devnull, os.O_WRONLY)
        return ResilientWriter(descriptor)


class Relay(threading.Thread):
    """Passes on what the ranks print and report, until all of them have closed their pipes."""

    def __init__(self, launcher: Launcher, outputs: Mapping[int, int], reports: int, logs: Path) -> None:
        """`outputs`: the rank of each descriptor to read."""
        super().__init__(name="relay", daemon=True)
        self._launcher, self._outputs, self._reports = launcher, outputs, reports
        self._logs = {rank: RankLog(logs / f"rank-{rank:05d}.log") for rank in outputs.values()}
        self._rests: dict[int, bytes] = {}
        self._starting: dict[int, bool] = {}
        """Ranks by process number, and whether they still start."""
        self.locks = HeldLocks()

    def run(self) -> None:
        _leave_signals_to_main_thread()
        told_s = 0.0
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._outputs, self._reports):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(_TICK_S):
                    if not self._take(key.fd):
                        selector.unregister(key.fd)
                if time.monotonic() - told_s >= _TICK_S:
                    told_s = time.monotonic()
                    # A stopped rank reports nothing.
                    self._launcher.send(stopped=[pid for pid in self._starting if process_state(pid) == "T"])
                    self.locks.note(pid for pid, is_starting in self._starting.items() if is_starting)

    def _take(self, descriptor: int) -> bool:
        """Read what there is. Return False at the end."""
        data = os.read(descriptor, 1 << 16)
        rank = self._outputs.get(descriptor)
        if rank is not None:
            self._logs[rank].write(data)
        *lines, rest = (self._rests.pop(descriptor, b"") + data).split(b"\n")
        if rest and (not data or len(rest) > _LINE_BYTES):
            lines.append(rest)
        else:
            self._rests[descriptor] = rest
        for line in lines:
            if rank is None:
                report = json.loads(line)
                self._starting[report["pid"]] = report["phase"] == "starting"
                self._launcher.send(**report)
            else:
                for begin in range(0, max(len(line), 1), _LINE_BYTES):
                    text = line[begin : begin + _LINE_BYTES].decode(errors="replace").rstrip("\r")
                    self._launcher.send(rank=rank, text=text)
        return bool(data)


def connection_ends() -> tuple[str | None, str | None]:
    """Return the addresses of the launcher's machine and of this one, as the other sees it, from ssh or Slurm.

    None where neither has set them.
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4:
        return words[0], words[2]
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    with contextlib.suppress(OSError):
        return (launcher, source_address(launcher)) if launcher else (None, None)
    return None, None


def _run_ranks(launcher: Launcher, order: Mapping[str, Any]) -> int:
    """Start the ranks and return their exit status."""
    ranks = order["ranks"]
    environments = rank_environment(os.environ, len(ranks), int(order["variables"]["MASTER_PORT"]), count_cpus())
    for rank, environment in zip(ranks, environments, strict=True):
        environment.update(order["variables"], RANK=str(rank))
    outputs, (reading, reports) = [os.pipe() for _ in ranks], os.pipe()
    os.set_blocking(reports, False)
    pipes = {descriptor: rank for rank, (descriptor, _) in zip(ranks, outputs, strict=True)}
    relay = Relay(launcher, pipes, reading, Path(order["logs"]))
    relay.start()
    status = LocalRanks(
        rank_command(Path(order["script"]), order["arguments"]),
        environments,
        show=lambda line: print(line, file=sys.stderr, flush=True),
        outputs=[descriptor for _, descriptor in outputs],
        reports=reports,
        note_end=lambda number, code: launcher.send(rank=ranks[number], code=code),
        should_end=launcher.is_gone,
    ).run()
    relay.join(_LAST_OUTPUT_S)
    relay.locks.remove()
    return status


def main() -> int:
    """Serve one attempt of a launch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # sshd sends it when the connection closes, which stdin shows too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher = Launcher(os.dup(0), os.dup(1))
    # Only messages go through the connection.
    os.dup2(2, 1)
    hello = launcher.next_order()
    if hello is None:
        return 0
    os.environ.update(hello["environment"])
    launcher.limit_s = hello["limit_s"]
    try:
        os.chdir(hello["cwd"])
    except OSError as error:
        print(f"{hello['cwd']}: {error.strerror}. Every host needs the code at the same path", file=sys.stderr)
        return 1
    for lock in remove_stale_locks():
        print(f"removed {lock}, left by a build that was killed", file=sys.stderr, flush=True)
    client_address, own_address = connection_ends()
    launcher.send(port=find_port(None)[0], own_address=own_address, client_address=client_address)
    order = launcher.next_order()
    status = 0 if order is None else _run_ranks(launcher, order)
    launcher.send(done=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
