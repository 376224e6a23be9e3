"""Connections to the hosts of an attempt: their names, the command that reaches each, and messages to its agent."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.protocol import (
    Channel,
    Hello,
    LineReader,
    Message,
    Output,
    Ping,
    RankStatus,
    Ready,
    Refused,
    Stacks,
    Start,
    StatusReport,
    Stop,
    Stopped,
)
from llmscale.cluster.remote import command_for, is_this_machine, module_argv
from llmscale.errors import ConfigError

#: Slurm's variables for the number of ranks per node, in the order of preference.
_SLOT_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_NODE")


def slurm_hosts(variables: Mapping[str, str], slots: int | None = None) -> tuple[Host, ...]:
    """Return all nodes of the Slurm job, each with `slots` ranks, or as many as the job has GPUs or tasks per node.

    Raises ConfigError outside of a job.
    """
    nodes = variables.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError("--launcher slurm: SLURM_JOB_NODELIST is not set, so this is not a Slurm job. Use sbatch.")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--launcher slurm: scontrol cannot be run ({error}).") from None
    if done.returncode or not done.stdout.split():
        raise ConfigError(f"--launcher slurm: scontrol does not know '{nodes}': {done.stderr.strip()}.")
    return tuple(Host(name, slots or _slots(variables)) for name in done.stdout.split())


def _slots(variables: Mapping[str, str]) -> int:
    for name in _SLOT_VARIABLES:
        # SLURM_GPUS_PER_NODE may begin with a type: a100:8.
        number = re.search(r"(\d+)(\(x\d+\))?$", variables.get(name, ""))
        if number and int(number.group(1)) > 0:
            return int(number.group(1))
    return 1


LAUNCHERS = ("ssh", "slurm")
_AGENT = "llmscale.cluster.launch.agent"


def agent_command_by(launcher: str) -> Callable[[Host], list[str]]:
    """Return the function from a host to the command that starts its agent and connects stdin and stdout to it.

    The command holds no secret: every user of both machines can read it.
    """

    def agent_command(host: Host) -> list[str]:
        argv = module_argv(_AGENT)
        if launcher == "slurm":
            return _srun_command(host.name, argv)
        if is_this_machine(host.name):
            # This shell's own ssh connection says nothing about how the hosts reach each other.
            return ["env", "--unset=SSH_CONNECTION", *argv]
        return command_for(host.name, argv)

    return agent_command


def _srun_command(host: str, argv: list[str]) -> list[str]:
    """Return the command that runs `argv` as one task on one node of the job, as ssh would."""
    return [
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--unbuffered", "--quiet"),
        # The node's full memory and cores; otherwise a step gets the share of one task.
        *("--mem=0", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=0", *argv),
    ]


#: Number and length of the stderr lines that are kept to explain why a host was lost.
_ERROR_LINES = 20
_ERROR_CHARACTERS = 1000
_PING_S = 1.0


class HostConnection:
    """The supervisor's side of one host of an attempt: its agent's process and reports."""

    def __init__(self, host: Host, argv: Sequence[str], hello: Hello) -> None:
        """Start the agent with the command `argv` and greet it. Raises OSError."""
        self.host = host
        # In a separate session: Ctrl-C in the terminal reaches the supervisor alone, which tells the agents what to do.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._ranks = range(0)
        self._errors = LineReader(self._process.stderr.fileno())
        self._error_lines: deque[str] = deque(maxlen=_ERROR_LINES)
        self.ready: Ready | None = None
        self.refusal: str | None = None
        self.stopped: Stopped | None = None
        self.statuses: dict[int, RankStatus] = {}
        self.launcher_code: int | None = None
        self._last_heard = self._last_ping = time.monotonic()
        self._channel = Channel(self._process.stdout.fileno(), self._stdin.fileno())
        self._channel.send(hello)

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def descriptors(self) -> list[int]:
        """Return the open descriptors to wait for."""
        errors = [] if self._errors.closed else [self._errors.descriptor]
        return errors if self.closed else [*errors, self._channel.reader.descriptor]

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._last_heard

    @property
    def closed(self) -> bool:
        """Return whether the connection has ended."""
        return self._channel.closed

    @property
    def gone(self) -> bool:
        """Return whether no agent serves this host: it refused, or its connection has ended."""
        return self.closed or self.refusal is not None

    def send(self, message: Message) -> None:
        """Queue a message to the agent; a closed connection drops it."""
        if isinstance(message, Start):
            self._ranks = message.ranks
        self._channel.send(message)

    def receive(self) -> tuple[list[Message], list[str]]:
        """Return the messages since the last call, and other lines to show. Records the states in the messages."""
        messages, lines = self._channel.receive()
        messages = [message for message in messages if self._is_its_own(message)]
        errors = self._errors.read()
        self._error_lines.extend(line[:_ERROR_CHARACTERS] for line in errors if line.strip())
        for message in messages:
            self._last_heard = time.monotonic()
            self._note(message)
        return messages, lines + errors

    def _is_its_own(self, message: Message) -> bool:
        """Return whether a message is about this host's own ranks, the only ones that it may report."""
        if isinstance(message, Output):
            return message.rank is None or message.rank in self._ranks
        return not isinstance(message, Stacks) or message.rank in self._ranks

    def _note(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.ready = self.ready or message
        elif isinstance(message, Refused):
            self.refusal = message.reason[:_ERROR_CHARACTERS]
        elif isinstance(message, Stopped):
            self.stopped = message
        elif isinstance(message, StatusReport):
            self.statuses.update({status.rank: status for status in message.ranks if status.rank in self._ranks})
            self.launcher_code = message.launcher_code

    def ping(self) -> None:
        """Renew the agent's lease, at most once a second."""
        if time.monotonic() - self._last_ping >= _PING_S:
            self._last_ping = time.monotonic()
            self.send(Ping())
        self._channel.flush()

    def why_lost(self) -> str:
        """Return one line that explains why the host is lost."""
        if self.refusal:
            return self.refusal
        if self._channel.reader.has_cut:
            return "it sent a message that is too long"
        if self._error_lines:
            return self._error_lines[-1]
        code = self._process.poll()
        if self.closed:
            return "its connection closed" + ("" if code is None else f" (exit status {code})")
        return f"no message from it for {self.silence_s:.0f} s"

    def close(self, patience_s: float = 5.0) -> None:
        """Close the connection, which ends the agent, and wait for its process."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


#: Number and length of the lines of each rank that are kept as evidence.
_KEPT_LINES = 30
_KEPT_CHARACTERS = 2000
#: Longest wait for messages in one poll.
_WAIT_S = 0.2


class HostPool:
    """All hosts of one attempt, by name."""

    def __init__(
        self,
        hosts: Sequence[Host],
        agent_command: Callable[[Host], list[str]],
        hello: Hello,
        show: Callable[[str], None],
    ) -> None:
        """Start the agent of every host with `agent_command(host)`; `show` prints one line."""
        self.nodes: dict[str, HostConnection] = {}
        self.left_out: dict[str, str] = {}
        """Hosts left out of the attempt, with the reason."""
        for host in hosts:
            try:
                self.nodes[host.name] = HostConnection(host, agent_command(host), hello)
            except OSError as error:
                self.left_out[host.name] = f"its agent cannot be started from here: {error}"
        self.last_lines: dict[tuple[str, int | None], deque[str]] = {}
        """The newest lines by host and rank; the rank is None for the launcher."""
        self._show = show

    def poll(self) -> list[tuple[HostConnection, Message]]:
        """Wait for messages, show output lines and return all other messages."""
        self._wait()
        others = []
        for node in self.nodes.values():
            messages, lines = node.receive()
            for message in messages:
                if isinstance(message, Output):
                    self._show_output(node, message)
                else:
                    others.append((node, message))
            for line in lines:
                self._show(f"{node.name}! {line}")
            node.ping()
        return others

    def _wait(self) -> None:
        """Wait until a host can be read from, for at most `_WAIT_S`."""
        descriptors = [descriptor for node in self.nodes.values() for descriptor in node.descriptors]
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            if descriptors:
                selector.select(_WAIT_S)
            else:
                time.sleep(_WAIT_S)

    def gather(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Wait until every host has answered, and leave out those that do not in time. Returns early on `stop`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not stop():
            if all(node.ready or node.gone for node in self.nodes.values()):
                break
            self.poll()
        for node in list(self.nodes.values()):
            if node.ready is None or node.gone:
                self.dismiss(node.name, node.why_lost())
            else:
                for note in node.ready.notes:
                    self._show(f"{node.name}: {note}")

    def dismiss(self, name: str, why: str) -> None:
        """Leave a host out of the attempt."""
        self.left_out[name] = why
        self.nodes.pop(name).close(patience_s=0.5)

    def broadcast(self, messages: Mapping[str, Message] | Message) -> None:
        """Send one message to every host, or to each the one under its name."""
        for name, node in self.nodes.items():
            node.send(messages if isinstance(messages, Message) else messages[name])

    def disband(self, timeout_s: float, lost_after_s: float) -> list[HostConnection]:
        """Stop the ranks on every host and return the hosts that did not confirm it in time."""
        self.broadcast(Stop())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(
            not node.stopped and not node.gone and node.silence_s < lost_after_s for node in self.nodes.values()
        ):
            self.poll()
        return [node for node in self.nodes.values() if node.stopped is None]

    def close(self) -> None:
        """Close every connection."""
        for node in self.nodes.values():
            # A lost host does not answer, and its connection would wait for it.
            node.close(patience_s=5.0 if node.stopped else 0.0)

    def _show_output(self, node: HostConnection, output: Output) -> None:
        lines = self.last_lines.setdefault((node.name, output.rank), deque(maxlen=_KEPT_LINES))
        lines.append(output.text[:_KEPT_CHARACTERS])
        speaker = "launcher" if output.rank is None else f"rank {output.rank}"
        self._show(f"{node.name} {speaker}: {output.text}")
