"""Where agents call back whose starter cannot carry a conversation: pdsh does not pass stdin on."""

from __future__ import annotations

import contextlib
import os
import socket

from llmscale.cluster.launch.channel import Channel, LineReader


class Listener:
    """A port of this machine. Only callers that begin with a known token are listened to."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.setblocking(False)
        self._callers: list[LineReader] = []

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def descriptors(self) -> list[int]:
        """What to wait for."""
        return [self._socket.fileno(), *(caller.descriptor for caller in self._callers)]

    def accept(self) -> dict[str, Channel]:
        """Channels of callers whose first line has come, by that line."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._callers.append(LineReader(connection.detach()))
        found, still = {}, []
        for caller in self._callers:
            # A caller says nothing more before it is answered: its first line is all there is.
            lines = caller.read()
            if lines:
                found[lines[0]] = Channel(caller.descriptor, caller.descriptor)
            elif caller.closed:
                os.close(caller.descriptor)
            else:
                still.append(caller)
        self._callers = still
        return found

    def close(self) -> None:
        self._socket.close()
        for caller in self._callers:
            os.close(caller.descriptor)
