"""Messages over two file descriptors that never block: a supervisor or an agent must not wait for a stuck peer."""

from __future__ import annotations

import os

from llmscale.cluster.launch.messages import Message, Output, decode

#: Output lines are dropped while this much is waiting to be sent: the log files have them, and a peer that does not
#: read must not fill the memory.
MOST_WAITING_BYTES = 4 << 20
_READ_BYTES = 1 << 16


class LineReader:
    """Lines from a non-blocking descriptor."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        """The other side has closed its end."""
        self._rest = b""

    def read(self) -> list[str]:
        """Whole lines that have come; at the end of the stream also an unfinished one."""
        chunks = []
        while not self.closed:
            try:
                chunk = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.closed = True
                break
            chunks.append(chunk)
            if len(chunk) < _READ_BYTES:
                break
        *whole, self._rest = (self._rest + b"".join(chunks)).split(b"\n")
        if self.closed and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]


class Channel:
    """Messages to and from one peer."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self.reader = LineReader(read_descriptor)
        os.set_blocking(write_descriptor, False)
        self._write_descriptor = write_descriptor
        self._waiting = b""

    @property
    def closed(self) -> bool:
        """The peer is gone, or the connection to it."""
        return self.reader.closed

    @property
    def has_waiting(self) -> bool:
        """Something is still to be sent to a peer that is there."""
        return bool(self._waiting) and not self.closed

    def send(self, message: Message) -> None:
        """Queue a message and write what can be written now."""
        if isinstance(message, Output) and len(self._waiting) > MOST_WAITING_BYTES:
            return
        self._waiting += message.encode().encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what is waiting, as far as the peer takes it."""
        while self._waiting and not self.closed:
            try:
                written = os.write(self._write_descriptor, self._waiting)
            except BlockingIOError:
                return
            except OSError:
                # The peer's last words may still be there to be read: only reading finds the end.
                self._waiting = b""
                return
            self._waiting = self._waiting[written:]

    def receive(self) -> tuple[list[Message], list[str]]:
        """Messages that have come, and lines that are none."""
        messages, others = [], []
        for line in self.reader.read():
            message = decode(line)
            if message is not None:
                messages.append(message)
            elif line:
                others.append(line)
        return messages, others
