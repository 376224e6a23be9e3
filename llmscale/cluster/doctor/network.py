"""Check names, interfaces and rendezvous between hosts, and judge the measured all-reduce. No torch."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.cluster.doctor.host_facts import HostFacts, Interface, NetworkFacts, ProbeRequest, Route
from llmscale.cluster.doctor.rows import CheckRow, differ, green, grouped, listed, red, yellow
from llmscale.cluster.free_port import find_port
from llmscale.config.hardware import find_gpu

#: Below these fractions of what the links promise, the all-reduce goes another way than it should.
SLOW_FAIL_FRAC, SLOW_WARN_FRAC = 0.1, 0.2
#: gloo copies through one core per rank: more than this it does not reach, whatever the link. Bytes/s.
GLOO_BYTES_PER_S = 1.25e9


@dataclass(frozen=True)
class AllReduceResult:
    """A timed all-reduce over all hosts."""

    backend: str
    """gloo or nccl."""
    world_size: int
    num_bytes: int
    seconds: float
    """Median time of one all-reduce of num_bytes."""
    latency_s: float
    """Median time of one of 8 bytes."""

    @property
    def bus_bytes_per_s(self) -> float:
        """What each link carries in one direction: 2 (N - 1) / N of the buffer passes it (NVIDIA's nccl-tests,
        PERFORMANCE.md)."""
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.seconds


def check_network(facts: Mapping[str, HostFacts], first_host: str, port: int) -> Iterator[CheckRow]:
    """Whether every host can be found and listens where the others look for it."""
    networks = {host: found.network for host, found in facts.items() if found.network}
    if len(networks) > 1:
        yield from _check_names(networks)
        yield from _check_interfaces(networks, first_host)
        yield from _check_mtu(networks)
        yield from _check_master(networks, first_host)
    if first_host in networks:
        if networks[first_host].port_free:
            yield green("port", f"{port} is free on {first_host}")
        else:
            yield red(
                "port",
                f"{port} is in use on {first_host}",
                "Give another one (--port here, --master_port to deepspeed), or end its owner: "
                f"ss -ltnp 'sport = :{port}'",
            )


def _check_names(networks: Mapping[str, NetworkFacts]) -> Iterator[CheckRow]:
    """Every host's name must mean the same machine everywhere, and not the asking host itself."""
    sound = True
    for host, network in networks.items():
        for peer, route in network.routes.items():
            if peer == host or peer not in networks:
                continue
            if route.address is None:
                sound = False
                yield red("names", f"{host} cannot resolve {peer}", f"Add {peer} to DNS, or to /etc/hosts on {host}.")
            elif _is_loopback(route.address):
                sound = False
                yield red(
                    "names",
                    f"on {host}, {peer} resolves to {route.address}, that is to {host} itself",
                    f"Write {peer}'s address in /etc/hosts on {host}.",
                )
            elif route.source is None:
                sound = False
                yield red(
                    "names",
                    f"{host} has no way to {peer} ({route.address})",
                    f"Bring the interface up on {host} (ip link, ip route), or correct the address.",
                )
            elif route.address not in {interface.address for interface in networks[peer].interfaces}:
                sound = False
                yield yellow(
                    "names",
                    f"on {host}, {peer} resolves to {route.address}, which is no address of its interfaces",
                    f"Correct it in /etc/hosts on {host} or in DNS, unless the address is translated on the way.",
                )
    if sound:
        yield green("names", "every host resolves every other")


def _check_interfaces(networks: Mapping[str, NetworkFacts], first_host: str) -> Iterator[CheckRow]:
    """Where the ranks will listen (llmscale.engine.network): the named interface, else the one towards the
    first host. On GPUs too: control messages use gloo beside NCCL."""
    used: dict[str, object] = {}
    for host, network in networks.items():
        wrong = list(_check_named_interfaces(host, network))
        yield from wrong
        way = _listening_interface(host, network, first_host)
        if wrong:
            continue
        if way is None and host == first_host:
            yield red("interface", f"{host} has no address but loopback's", f"On {host}: ip addr, and bring one up.")
        if way is None:
            continue  # another host's: the row about names says why
        if way.up:
            used[host] = way.name
        else:
            yield red(
                "interface", f"{host}: {way.name} ({way.address}) is down", f"On {host}: ip link set {way.name} up"
            )
    if len(used) == len(networks):
        yield green("interface", f"gloo and NCCL meet on {grouped(used)}")


def _check_named_interfaces(host: str, network: NetworkFacts) -> Iterator[CheckRow]:
    named = {"GLOO_SOCKET_IFNAME": network.gloo_interface, "NCCL_SOCKET_IFNAME": network.nccl_interface}
    for variable, name in named.items():
        problem = _named_interface_problem(network, name) if name else None
        if problem:
            yield red("interface", f"{host}: {variable}={name}, but {problem[0]}", problem[1])


def _listening_interface(host: str, network: NetworkFacts, first_host: str) -> Interface | None:
    """The first host listens on its first address, the others on the one that leads there."""
    if network.gloo_interface:
        wanted = network.gloo_interface.removeprefix("=").split(",")
        return next((interface for interface in network.interfaces if interface.name in wanted), None)
    if host == first_host:
        return network.interface_of(network.first_address)
    route = network.routes.get(first_host)
    if route is None or route.source is None or _is_loopback(route.source):
        return None
    return network.interface_of(route.source)


def _named_interface_problem(network: NetworkFacts, name: str) -> tuple[str, str] | None:
    """What is wrong with an interface that a variable names, and the fix. NCCL's variable may hold several prefixes, or
    begin with = (exact) or ^ (all but)."""
    if name.startswith("^"):
        return None
    wanted = name.removeprefix("=").split(",")
    found = [
        interface for interface in network.interfaces if any(interface.name.startswith(prefix) for prefix in wanted)
    ]
    others = ", ".join(interface.name for interface in network.interfaces if interface.up and interface.address)
    if not found:
        return "there is no such interface", f"Name one of {others}, or unset the variable."
    if not any(interface.up and interface.address for interface in found):
        return (
            "that is down or has no IPv4 address",
            f"Name one of {others}, or unset the variable; or: ip link set {found[0].name} up",
        )
    return None


def _way_out(host: str, network: NetworkFacts) -> Interface | None:
    """The interface on the way to the first other host that can be reached."""
    for peer, route in network.routes.items():
        if peer != host and route.source and not _is_loopback(route.source):
            return network.interface_of(route.source)
    return None


def _check_mtu(networks: Mapping[str, NetworkFacts]) -> Iterator[CheckRow]:
    ways = {host: way for host, network in networks.items() if (way := _way_out(host, network))}
    sizes = {host: way.mtu for host, way in ways.items()}
    if differ(sizes):
        least = min(ways.values(), key=lambda way: way.mtu)
        yield yellow(
            "mtu",
            f"largest packet: {grouped(sizes)}; large messages can hang between such hosts",
            f"Set one MTU on all hosts and switches, at most what the network carries: ip link set {least.name} mtu "
            f"{least.mtu}",
        )
    elif sizes:
        yield green("mtu", grouped(sizes))


def _check_master(networks: Mapping[str, NetworkFacts], first_host: str) -> Iterator[CheckRow]:
    """deepspeed tells every rank the first address of the first host (`hostname -I`)."""
    master = networks.get(first_host)
    if master is None:
        return
    known_as = {
        host: network.routes[first_host].address
        for host, network in networks.items()
        if host != first_host and first_host in network.routes and network.routes[first_host].address
    }
    other = {host: address for host, address in known_as.items() if address != master.first_address}
    if other and not all(_is_loopback(str(address)) for address in other.values()):
        address = next(iter(other.values()))
        yield yellow(
            "master",
            f"the first address of {first_host} is {master.first_address}, {listed(other)} reach it as {address}",
            f"Give deepspeed --master_addr {address}.",
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def promised_bytes_per_s(facts: Mapping[str, HostFacts], backend: str) -> float | None:
    """What the slowest host's links promise in one direction: all InfiniBand ports for NCCL, else the interface on the
    way to the others; the hardware table's link within one host. None when neither driver nor table says."""
    promises = []
    if len(facts) == 1:
        gpus = next(iter(facts.values())).gpus
        known = [model for gpu in (gpus.gpus if gpus else ()) if (model := find_gpu(gpu.name))]
        return min((model.link_bytes_per_s for model in known), default=None)
    for host, found in facts.items():
        if found.network is None:
            continue
        if backend == "nccl" and found.network.infiniband_bits_per_s:
            promises.append(sum(found.network.infiniband_bits_per_s) / 8)
            continue
        way = _way_out(host, found.network)
        if way and way.bits_per_s:
            promises.append(way.bits_per_s / 8)
    if not promises:
        return None
    return min(*promises, GLOO_BYTES_PER_S) if backend == "gloo" else min(promises)


def check_all_reduce(result: AllReduceResult, promised_bytes_per_s: float | None) -> CheckRow:
    """Bus bandwidth against what the links promise (bytes/s, one direction)."""
    measured = result.bus_bytes_per_s
    found = (
        f"{_speed(measured)} over {result.world_size} ranks on {result.backend} "
        f"({result.num_bytes / 2**20:.0f} MiB in {result.seconds * 1e3:.0f} ms, "
        f"latency {result.latency_s * 1e3:.2f} ms)"
    )
    if promised_bytes_per_s is None:
        return green("all-reduce", found)
    found += f"; the links promise {_speed(promised_bytes_per_s)}"
    frac = measured / promised_bytes_per_s
    if frac >= SLOW_WARN_FRAC:
        return green("all-reduce", found)
    fix = "See which way it goes (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and test the link: iperf3 between two hosts."
    if result.backend == "nccl":
        fix = (
            "NCCL_DEBUG=INFO says which network it takes (NET/IB or NET/Socket); ibstat and ethtool say what links run."
        )
    return (red if frac < SLOW_FAIL_FRAC else yellow)("all-reduce", found, fix)


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


def explain_failed_all_reduce(said: Mapping[str, str], port: int) -> CheckRow:
    """When the ranks did not meet, or not finish: the last line of each host."""
    return red(
        "all-reduce",
        f"did not finish: {grouped(said)}",
        f"Open all TCP ports between the hosts (firewalld, ufw, security groups; not only {port}: the ranks connect to "
        "each other on any), or name the interface: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=...",
    )


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
    return Interface(name, up, mtu, address, _link_speed(name))


def _link_speed(name: str) -> int | None:
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
