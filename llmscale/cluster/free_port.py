"""A port that ranks can meet at."""

from __future__ import annotations

import socket


def find_port(preferred: int | None) -> tuple[int, bool]:
    """A free TCP port of this host, and whether `preferred` was wanted and is taken.

    Free means that nobody listens there on any address. Another program may still take it before the ranks do: they
    then fail at once, and the next attempt asks again.
    """
    if preferred is not None and is_free(preferred):
        return preferred, False
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1], preferred is not None


def is_free(port: int) -> bool:
    """Whether a server could listen on `port`, as torch's store does: on all addresses."""
    with socket.socket() as probe:
        # As torch does: connections that linger from the attempt before are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
        return True
