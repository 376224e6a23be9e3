"""Messages over two file descriptors that never block: a supervisor or an agent must not wait for a stuck peer."""

from __future__ import annotations

import os
from collections.abc import Callable

from llmscale.cluster.launch.messages import Message, Output, decode
from llmscale.cluster.launch.tls import TlsSession

#: Output lines are dropped while this much is waiting to be sent: the log files have them, and a peer that does not
#: read must not fill the memory.
MOST_WAITING_BYTES = 4 << 20
#: A message that is longer than this ends the conversation.
MOST_MESSAGE_BYTES = 16 << 20
#: What is printed comes in pieces of at most this, so that a line without an end does not fill the memory. In JSON one
#: byte may become six: a piece still fits into a message.
MOST_LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
#: Read at a time from one descriptor, so that one that always has more does not keep the others waiting.
_MOST_AT_ONCE_BYTES = 4 << 20


class LineReader:
    """Lines from a non-blocking descriptor."""

    def __init__(
        self,
        descriptor: int,
        most_bytes: int = MOST_LINE_BYTES,
        decrypt: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """A line of more than `most_bytes` comes in pieces. `decrypt` turns what is read into what was said, and raises
        OSError when the rest of the stream is worthless."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        """The other side has closed its end."""
        self.has_cut = False
        """A line was too long."""
        self._most_bytes, self._decrypt = most_bytes, decrypt
        self._rest = b""

    def read(self) -> list[str]:
        """Whole lines that have come; at the end of the stream also an unfinished one."""
        chunks: list[bytes] = []
        while not self.closed and len(chunks) * _READ_BYTES < _MOST_AT_ONCE_BYTES:
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
        *whole, self._rest = (self._rest + self._plain(b"".join(chunks))).split(b"\n")
        if self.closed and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in self._cut(whole)]

    def _plain(self, received: bytes) -> bytes:
        if self._decrypt is None or not received:
            return received
        try:
            return self._decrypt(received)
        except OSError:
            self.closed = True
            return b""

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        """Lines, and the unfinished one as soon as it is too long, in pieces."""
        if len(self._rest) > self._most_bytes:
            lines.append(self._rest)
            self._rest = b""
        if all(len(line) <= self._most_bytes for line in lines):
            return lines
        self.has_cut = True
        size = self._most_bytes
        return [line[start : start + size] for line in lines for start in range(0, max(len(line), 1), size)]


class Channel:
    """Messages to and from one peer."""

    def __init__(self, read_descriptor: int, write_descriptor: int, session: TlsSession | None = None) -> None:
        """`session` encrypts them, its handshake done."""
        self.reader = LineReader(read_descriptor, MOST_MESSAGE_BYTES, session.decrypt if session else None)
        os.set_blocking(write_descriptor, False)
        self._write_descriptor = write_descriptor
        self._session = session
        self._waiting = b""

    @property
    def closed(self) -> bool:
        """The peer is gone, or the connection to it, or what it says makes no sense."""
        return self.reader.closed or self.reader.has_cut

    @property
    def has_waiting(self) -> bool:
        """Something is still to be sent to a peer that is there."""
        return bool(self._waiting) and not self.closed

    def send(self, message: Message) -> None:
        """Queue a message and write what can be written now."""
        if isinstance(message, Output) and len(self._waiting) > MOST_WAITING_BYTES:
            return
        line = message.encode().encode() + b"\n"
        self._waiting += self._session.encrypt(line) if self._session else line
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
        lines = [] if self.closed else self.reader.read()
        for line in [] if self.reader.has_cut else lines:
            message = decode(line)
            if message is not None:
                messages.append(message)
            elif line:
                others.append(line)
        return messages, others
