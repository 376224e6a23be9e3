"""The supervisor's agent on one host: `python -m llmscale.cluster.launch.agent`, which talks over stdin and stdout.

It starts this host's ranks and reports their state. It ends them on request, when the connection closes, after a lease
without a message, and when it dies itself. Nothing that it started outlives it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from llmscale.cluster.extension_locks import remove_stale_locks
from llmscale.cluster.launch.protocol import (
    Channel,
    DumpStacks,
    FindPort,
    Hello,
    Message,
    Port,
    Ready,
    Refused,
    Signal,
    Signalled,
    Start,
    StatusReport,
    Stop,
    Stopped,
)
from llmscale.cluster.launch.ranks import NodeRanks, adopt_orphans, find_port
from llmscale.engine.network import source_address
from llmscale.errors import ConfigError
from llmscale.training.run_folder import lock_run_folder
from llmscale.training.stop_request import STOP_SIGNALS

_TICK_S = 0.2
_REPORT_S = 1.0
#: Time that a disconnected predecessor has to end its ranks.
_PREDECESSOR_S = 30.0
#: Time limit for the supervisor's first message.
_HELLO_S = 60.0
#: Folder in the run folder that holds one lock per host.
CLAIMS_NAME = ".agents"


class Agent:
    """One connection to a supervisor, from its Hello to the end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._environment: dict[str, str] = {}
        self._lease_s = _HELLO_S
        self._last_heard = time.monotonic()
        self._last_report = 0.0
        self._last_states: object = None
        self._ranks: NodeRanks | None = None
        self._claim: TextIO | None = None
        self._watch_prefix = ""
        self._end: str | None = None
        """Reason to end, once there is one."""
        self._signals: list[str] = []

    def serve(self) -> None:
        """Serve until the supervisor says Stop, or is gone."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _frame: self._signals.append(signal.Signals(number).name))
        # sshd sends it when the connection closes, which stdin shows too.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.reader.descriptor, selectors.EVENT_READ)
            while self._end is None:
                selector.select(_TICK_S)
                self._take_messages()
                self._tick()
        self._finish(self._end)

    def _take_messages(self) -> None:
        messages, _ = self._channel.receive()
        for message in messages:
            self._last_heard = time.monotonic()
            self._handle(message)
        silence_s = time.monotonic() - self._last_heard
        if self._channel.closed:
            self._end = "the supervisor is gone"
        elif silence_s > self._lease_s:
            self._end = f"no message from the supervisor for {silence_s:.0f} s"

    def _handle(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._welcome(message)
        elif isinstance(message, FindPort):
            self._channel.send(Port(*find_port(message.preferred)))
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Signal) and self._ranks:
            self._ranks.send_signal(signal.Signals[message.name])
        elif isinstance(message, DumpStacks) and self._ranks:
            for stacks in self._ranks.dump_stacks():
                self._channel.send(stacks)
        elif isinstance(message, Stop):
            self._end = "stopped by the supervisor"

    def _welcome(self, hello: Hello) -> None:
        self._lease_s, self._environment = hello.lease_s, hello.environment
        os.environ.update(hello.environment)
        try:
            os.chdir(hello.cwd)
        except OSError as error:
            self._refuse(f"{hello.cwd}: {error.strerror}. Every host needs the code at the same path")
            return
        try:
            self._claim = claim_run(Path(hello.run))
        except OSError as error:
            self._refuse(f"{hello.run} cannot be claimed: {error.strerror or error}")
            return
        if self._claim is None:
            self._refuse(f"ranks of another supervisor still run here for {hello.run}")
            return
        # A predecessor that was killed could not remove its folder.
        digest = hashlib.sha256(f"{os.getuid()} {hello.run}".encode()).hexdigest()[:16]
        self._watch_prefix = f"llmscale-watch-{digest}-"
        for left in Path(tempfile.gettempdir()).glob(f"{self._watch_prefix}*"):
            with contextlib.suppress(OSError):
                # Everyone may write to this folder: a name does not prove who owns it.
                if left.lstat().st_uid == os.getuid():
                    shutil.rmtree(left, ignore_errors=True)
        locks = remove_stale_locks()
        client, own = connection_ends()
        notes = [f"removed {lock}, left by a build that was killed" for lock in locks]
        self._channel.send(Ready(os.getpid(), client, own, notes))

    def _refuse(self, reason: str) -> None:
        self._channel.send(Refused(reason))
        self._end = reason

    def _start(self, start: Start) -> None:
        try:
            folder = Path(tempfile.mkdtemp(prefix=self._watch_prefix))
            self._ranks = NodeRanks(start, self._environment, folder)
        except OSError as error:
            self._refuse(f"the launcher could not be started: {error}")

    def _tick(self) -> None:
        while self._signals:
            name = self._signals.pop(0)
            if self._ranks:
                # SIGUSR1 for every signal: a rank that received the same SIGINT directly would end at the second one.
                self._ranks.send_signal(signal.SIGUSR1)
            self._channel.send(Signalled(name))
        if self._ranks:
            for output in self._ranks.read_output():
                self._channel.send(output)
            self._ranks.deliver_deferred()
        report = self._status_report()
        states = (
            report.launcher_code,
            [(status.rank, status.phase, status.exit_code, status.alive) for status in report.ranks],
        )
        if time.monotonic() - self._last_report > _REPORT_S or states != self._last_states:
            self._last_report, self._last_states = time.monotonic(), states
            if self._ranks:
                self._ranks.note_locks()
            self._channel.send(report)
        self._channel.flush()

    def _status_report(self) -> StatusReport:
        if self._ranks is None:
            return StatusReport([], None)
        # The code first: a rank's last heartbeat is written before its launcher ends.
        code = self._ranks.launcher_code
        return StatusReport(self._ranks.statuses(), code)

    def _finish(self, reason: str) -> None:
        code = None
        if self._ranks:
            code = self._ranks.end()
            for output in self._ranks.read_output(is_last=True):
                self._channel.send(output)
            # The heartbeat files outlive their ranks: the last one holds the step of each.
            self._channel.send(StatusReport(self._ranks.statuses(), code))
            self._ranks.close()
        self._channel.send(Stopped(reason, code))
        deadline = time.monotonic() + 2.0
        while self._channel.has_waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            self._channel.flush()


def claim_run(run: Path) -> TextIO | None:
    """Claim a run on this host while the returned file is open; None if another agent holds it. Raises OSError.

    The lock ends with its process. It is in the run folder, where no other user can take it first. Waits for a
    predecessor that lost its supervisor and is ending its ranks.
    """
    folder = run / CLAIMS_NAME
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            return lock_run_folder(folder, claim_name())
        except ConfigError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.2)


def claim_name() -> str:
    """Return a name that all processes in this host's network namespace share until it boots.

    The host name alone is not enough: two hosts of the same name would exclude each other. With the boot id, a claim
    that a powered-off host left on a file server excludes nobody.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()}-{hashlib.sha256(f'{boot} {network}'.encode()).hexdigest()[:16]}.lock"


def connection_ends() -> tuple[str | None, str | None]:
    """Return the addresses of the supervisor's machine and of this one, as the other sees it, from ssh or Slurm.

    None where neither has set them.
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4:
        return words[0], words[2]
    supervisor = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    with contextlib.suppress(OSError):
        return (supervisor, source_address(supervisor)) if supervisor else (None, None)
    return None, None


def main() -> int:
    """Serve one supervisor."""
    adopt_orphans()
    channel = Channel(os.dup(0), os.dup(1))
    # The ranks must not write into the connection: they inherit this process's stderr as stdout.
    os.dup2(2, 1)
    Agent(channel).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
