"""One host's side of `llmscale launch`: `python -m llmscale.cluster.launch.host`, started through ssh or srun.

It starts the ranks of this host, and passes on what they print and report. It ends them, and itself, when the
connection closes or the launcher has been silent for too long. Both sides write one JSON object per line. The exit
status is 0 if the ranks are gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmscale.cluster.hosts import take_place
from llmscale.cluster.launch.ranks import (
    RANK_SIGNALS,
    LocalRanks,
    descendants,
    kill_descendants,
    process_state,
    rank_command,
    rank_environment,
    remove_stale_locks,
)
from llmscale.engine.network import find_port, source_address
from llmscale.training.stop_request import LAUNCH_STOPS
from llmscale.untrusted.paths import open_own

#: Begins every message to the launcher: a login shell may print a greeting into the same stream.
MARK = b"@llmscale "
#: Time limit for the launcher's first message.
_HELLO_S = 60.0
_TICK_S = 1.0
#: Time that the last output has to arrive.
_LAST_OUTPUT_S = 5.0
#: Size at which a log is renamed FILE.1, replacing the earlier one.
LOG_BYTES = 64 << 20
#: Length from which a line is passed on in pieces.
_LINE_BYTES = 1 << 14


class Launcher:
    """The connection to the launcher, whose end is that of the ranks and of this process."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self._read = read_descriptor
        self._write = write_descriptor
        self.limit_s = _HELLO_S
        """Silence after which the launcher counts as gone."""
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        """Messages of the launcher, None after the last one."""
        self.why_gone = ""
        """How the connection ended, once it has."""
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def send(self, **message: object) -> None:
        """Send a message; a closed connection drops it."""
        rest = MARK + json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._write, rest) :]

    def _receive(self) -> bytes:
        """Return what the launcher sends next; nothing once it is gone."""
        if not select.select([self._read], [], [], self.limit_s)[0]:
            self.why_gone = f"`llmscale launch` has been silent for {self.limit_s:g} s"
            return b""
        data = os.read(self._read, 1 << 16)
        if not data:
            self.why_gone = "`llmscale launch` closed the connection, as it does when it ends an attempt"
        return data

    def _listen(self) -> None:
        rest = b""
        while data := self._receive():
            *lines, rest = (rest + data).split(b"\n")
            for order in (json.loads(line) for line in lines if line):
                if "stop" in order:
                    os.kill(os.getpid(), signal.SIGTERM if order["stop"] == "SIGTERM" else LAUNCH_STOPS)
                else:
                    self.orders.put(order)
        self.orders.put(None)
        kill_descendants(os.getpid())
        time.sleep(_LAST_OUTPUT_S)
        # The main thread still sends what nobody reads.
        os._exit(0)


class RankLog:
    """A log file of limited size. A run must not die of its log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            print(f"WARNING: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            self._descriptor = os.open(os.devnull, os.O_WRONLY)

    def write(self, data: bytes) -> None:
        """Append what the disk takes."""
        with contextlib.suppress(OSError):
            if self._size + len(data) > LOG_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                os.close(self._descriptor)
                self._descriptor = self._open()
                self._size = 0
            self._size += os.write(self._descriptor, data)

    def _open(self) -> int:
        return open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _pass_output(launcher: Launcher, rank: int, output: int, log: RankLog) -> None:
    """Pass on what a rank prints, until it closes its pipe."""
    with open(output, "rb") as lines:
        while line := lines.readline(_LINE_BYTES):
            log.write(line)
            launcher.send(rank=rank, text=line.decode(errors="replace").rstrip("\r\n"))


def _pass_reports(launcher: Launcher, reports: int) -> None:
    """Pass on what the ranks of this host report."""
    with open(reports, "rb") as lines:
        for line in lines:
            launcher.send(**json.loads(line))


def _tell_stopped(launcher: Launcher) -> None:
    """Give signs of life, with the processes that are stopped: they report nothing."""
    while True:
        time.sleep(_TICK_S)
        launcher.send(stopped=[pid for pid in descendants(os.getpid()) if process_state(pid) == "T"])


def connection_ends() -> tuple[str | None, str | None]:
    """Return the addresses of the launcher's machine and of this one, as the other sees it, from ssh or Slurm.

    None where neither has set them.
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4:
        return words[0], words[2]
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if launcher:
        return (launcher, source_address(launcher))
    return (None, None)


def _run_ranks(launcher: Launcher, order: Mapping[str, Any]) -> None:
    """Start the ranks, and wait until they and their output have ended."""
    ranks = order["ranks"]
    outputs, (reading, reports) = [os.pipe() for _ in ranks], os.pipe()
    os.set_blocking(reports, False)
    logs = [RankLog(Path(order["logs"]) / f"rank-{rank:05d}.log") for rank in ranks]
    relays = [threading.Thread(target=_pass_reports, args=(launcher, reading), daemon=True)]
    for rank, (output, _), log in zip(ranks, outputs, logs, strict=True):
        relays.append(threading.Thread(target=_pass_output, args=(launcher, rank, output, log), daemon=True))
    for thread in (*relays, threading.Thread(target=_tell_stopped, args=(launcher,), daemon=True)):
        thread.start()
    began_s = time.time()
    LocalRanks(
        rank_command(Path(order["script"]), order["arguments"]),
        rank_environment(os.environ, ranks, order["variables"]),
        show=lambda line: print(line, file=sys.stderr, flush=True),
        outputs=[output for _, output in outputs],
        reports=reports,
        why_ended_here=lambda: launcher.why_gone,
        note_end=lambda number, code: launcher.send(rank=ranks[number], code=code),
    ).run()
    deadline_s = time.monotonic() + _LAST_OUTPUT_S
    for relay in relays:
        relay.join(max(0.0, deadline_s - time.monotonic()))
    remove_stale_locks(since_s=began_s)


def main() -> int:
    """Serve one attempt of a launch."""
    # Threads leave these to the main thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)
    # sshd sends it when the connection closes, which stdin shows too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher = Launcher(os.dup(0), os.dup(1))
    # Only messages go through the connection.
    os.dup2(2, 1)
    hello = launcher.orders.get()
    if hello is None:
        return 0
    launcher.limit_s = hello["limit_s"]
    take_place(hello)
    for lock in remove_stale_locks():
        print(f"removed {lock}, left by a build that was killed", file=sys.stderr, flush=True)
    client_address, own_address = connection_ends()
    launcher.send(port=find_port(), own_address=own_address, client_address=client_address)
    order = launcher.orders.get()
    if order is not None:
        _run_ranks(launcher, order)
    return 0


if __name__ == "__main__":
    sys.exit(main())
