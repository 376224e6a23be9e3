"""Finding a port."""

from __future__ import annotations

import socket

from llmscale.cluster.launch.ranks import find_port, is_free


def test_a_wanted_port_is_kept_when_it_is_free_and_replaced_when_it_is_taken() -> None:
    port, was_taken = find_port(None)
    assert not was_taken
    assert find_port(port) == (port, False)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        other, was_taken = find_port(port)
        assert was_taken
        assert other != port
    assert not is_free(99_999)
