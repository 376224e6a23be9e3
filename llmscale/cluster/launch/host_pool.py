"""All hosts of one attempt at once: reach them, listen, tell them, let go of them."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.host_connection import HostConnection
from llmscale.cluster.launch.listener import Listener
from llmscale.cluster.launch.messages import Hello, Message, Output, Stop
from llmscale.cluster.launch.reach import Reach

#: Lines per rank that are kept as evidence, and how much of each.
_KEPT_LINES = 30
_KEPT_CHARACTERS = 2000
#: For messages, before those who wait for them look around.
_WAIT_S = 0.2


class HostPool:
    """The nodes that have been reached, by name."""

    def __init__(
        self,
        hosts: Sequence[Host],
        reach: Callable[[Host, Listener], Reach],
        hello: Hello,
        show: Callable[[str], None],
    ) -> None:
        """Begin to reach every host; `show` prints one line."""
        self._listener = Listener()
        """Where those call back that must."""
        self.nodes: dict[str, HostConnection] = {}
        self.left_out: dict[str, str] = {}
        """Hosts that are not part of it, and why."""
        for host in hosts:
            try:
                self.nodes[host.name] = HostConnection(host, reach(host, self._listener), hello)
            except OSError as error:
                self.left_out[host.name] = f"it cannot be reached from here: {error}"
        self.last_lines: dict[tuple[str, int | None], deque[str]] = {}
        """What each rank of each host printed last; None is the launcher."""
        self._show = show

    def pump(self) -> list[tuple[HostConnection, Message]]:
        """Wait for messages; show what is output and return the rest."""
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
        """For anything that can be read; takes in those who call back."""
        descriptors = [descriptor for node in self.nodes.values() for descriptor in node.descriptors]
        descriptors += self._listener.descriptors
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            if descriptors:
                selector.select(_WAIT_S)
            else:
                time.sleep(_WAIT_S)
        callers = self._listener.accept({node.expected for node in self.nodes.values() if node.expected})
        for node in self.nodes.values():
            if node.expected in callers:
                node.connect(callers.pop(node.expected))

    def gather(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Until every host has answered or time is up; those that did not are left out, and nobody can call back any
        more. Returns early on `stop`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not stop():
            waiting = [node for node in self.nodes.values() if node.ready is None and not _gone(node)]
            if not waiting:
                break
            self.pump()
        self._listener.close()
        for node in list(self.nodes.values()):
            if node.ready is None or _gone(node):
                self.dismiss(node.name, node.why_lost())
            else:
                for note in node.ready.notes:
                    self._show(f"{node.name}: {note}")

    def dismiss(self, name: str, why: str) -> None:
        """Go on without a host."""
        self.left_out[name] = why
        self.nodes.pop(name).close(patience_s=0.5)

    def tell(self, messages: Mapping[str, Message] | Message) -> None:
        """Send to every node the same, or each its own."""
        for name, node in self.nodes.items():
            node.send(messages if isinstance(messages, Message) else messages[name])

    def disband(self, timeout_s: float, lost_after_s: float) -> list[HostConnection]:
        """End what runs on every host; those that did not confirm it. Returns when all have that are not lost, or time
        is up."""
        self.tell(Stop())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(
            not node.stopped and not _gone(node) and node.silence_s < lost_after_s for node in self.nodes.values()
        ):
            self.pump()
        return [node for node in self.nodes.values() if node.stopped is None]

    def close(self) -> None:
        """Close every connection."""
        self._listener.close()
        for node in self.nodes.values():
            # One that is lost does not answer, and its connection would wait for it.
            node.close(patience_s=5.0 if node.stopped else 0.0)

    def _show_output(self, node: HostConnection, output: Output) -> None:
        lines = self.last_lines.setdefault((node.name, output.rank), deque(maxlen=_KEPT_LINES))
        lines.append(output.text[:_KEPT_CHARACTERS])
        speaker = "launcher" if output.rank is None else f"rank {output.rank}"
        self._show(f"{node.name} {speaker}: {output.text}")


def _gone(node: HostConnection) -> bool:
    return node.closed or node.refusal is not None
