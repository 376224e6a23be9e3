"""Facts about names, addresses and interfaces of this host, by the C library and the kernel. Linux."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from llmscale.cluster.doctor.host_facts import Interface, NetworkFacts, ProbeRequest, Route
from llmscale.cluster.free_port import find_port

_INFINIBAND = Path("/sys/class/infiniband")
#: ioctl numbers and a flag of Linux's <linux/sockios.h> and <net/if.h>.
_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFMTU, _IFF_UP = 0x8915, 0x8913, 0x8921, 0x1
_IFF_RUNNING = 0x40
_SIOCETHTOOL, _ETHTOOL_GSET = 0x8946, 0x1
#: Any port: a UDP socket is only bound to its way, nothing is sent.
_DISCARD_PORT = 9


def gather_network(request: ProbeRequest) -> NetworkFacts:
    """How this host sees itself and its peers."""
    hostname = socket.gethostname()
    interfaces = tuple(_describe_interface(name) for _, name in socket.if_nameindex())
    spare_port, taken = find_port(request.port)
    outside = (found.address for found in interfaces if found.address and not found.address.startswith("127."))
    return NetworkFacts(
        hostname=hostname,
        hostname_address=_resolve(hostname),
        first_address=next(outside, None),
        interfaces=interfaces,
        routes={peer: _find_route(peer) for peer in request.peers},
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME"),
        infiniband_bits_per_s=_infiniband_rates(_INFINIBAND),
        port_free=not taken,
        spare_port=spare_port,
    )


def _describe_interface(name: str) -> Interface:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:

        def request(number: int) -> bytes:
            answer: bytes = fcntl.ioctl(ask, number, struct.pack("256s", name.encode()[:15]))
            return answer[16:]

        flags = struct.unpack("H", request(_SIOCGIFFLAGS)[:2])[0]
        mtu = struct.unpack("i", request(_SIOCGIFMTU)[:4])[0]
        address = None
        with contextlib.suppress(OSError):  # it has none
            address = socket.inet_ntoa(request(_SIOCGIFADDR)[4:8])
    up = bool(flags & _IFF_UP and flags & _IFF_RUNNING)
    return Interface(name, up, mtu, address, _speed(name))


def _speed(name: str) -> int | None:
    """Bits per second, from the driver; None where it does not say, as for a bridge or a tunnel. By ioctl, because
    /sys may be that of another network namespace."""
    command = array.array("B", struct.pack("I40x", _ETHTOOL_GSET))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        try:
            fcntl.ioctl(ask, _SIOCETHTOOL, struct.pack("16sP16x", name.encode()[:15], command.buffer_info()[0]))
        except OSError:
            return None
    # struct ethtool_cmd: the low half of the speed at byte 12, the high half at byte 28, in Mbit/s.
    low, high = struct.unpack_from("H", command, 12)[0], struct.unpack_from("H", command, 28)[0]
    megabits = low | high << 16
    return megabits * 10**6 if 0 < megabits < 0xFFFF_FFFF else None


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return None


def _find_route(peer: str) -> Route:
    address = _resolve(peer)
    if address is None:
        return Route(None, None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((address, _DISCARD_PORT))
        except OSError:
            return Route(address, None)
        source: str = way.getsockname()[0]
        return Route(address, source)


def _infiniband_rates(folder: Path) -> tuple[int, ...]:
    """Bits per second of every active port; `rate` reads like `400 Gb/sec (4X NDR)`."""
    rates = []
    for port in sorted(folder.glob("*/ports/*")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            layer = (port / "link_layer").read_text().strip()
            if "ACTIVE" in (port / "state").read_text() and layer == "InfiniBand":
                rates.append(int(float((port / "rate").read_text().split()[0]) * 10**9))
    return tuple(rates)
