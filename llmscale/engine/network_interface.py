"""The network interface by which the ranks of a run reach each other. No torch."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct

#: gloo's and NCCL's word for the interface to use.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFCONF = 0x8912
#: struct ifreq: 16 bytes of name, then a sockaddr_in whose address is at byte 20; 40 bytes on 64-bit Linux.
_IFREQ_BYTES = 40


def set_network_interface() -> None:
    """Name the interface that leads to MASTER_ADDR, unless the user has named one.

    Left alone, gloo announces the address that the host's own name stands for. On Debian and its kin that is 127.0.1.1:
    every other host then connects to itself and the run hangs or fails at its first collective.
    """
    name = interface_towards(os.environ["MASTER_ADDR"])
    if name is not None and name != "lo":
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)


def interface_towards(host: str) -> str | None:
    """The interface with the address that packets to `host` leave from; None when that cannot be told (no route, a
    name that does not resolve, IPv6, another system than Linux)."""
    try:
        address = source_address(host)
        return next((name for name, own in interface_addresses() if own == address), None)
    except OSError:
        return None


def source_address(host: str) -> str:
    """This machine's IPv4 address that packets to `host` leave from. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A datagram socket sends nothing when it connects; the kernel only picks the route.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_addresses() -> list[tuple[str, str]]:
    """Name and IPv4 address of every interface that is up. Raises OSError where the kernel has no such list."""
    table = array.array("B", bytes(_IFREQ_BYTES * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(table), table.buffer_info()[0])
        num_bytes = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
    records = [table[start : start + _IFREQ_BYTES].tobytes() for start in range(0, num_bytes, _IFREQ_BYTES)]
    return [(record[:16].split(b"\0")[0].decode(), socket.inet_ntoa(record[20:24])) for record in records]
