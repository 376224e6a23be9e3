"""Names, interfaces, rendezvous and bandwidth between hosts: gather, measure and check them.

`python -m llmscale.cluster.doctor.network ...`, on every host at once, times an all-reduce with one process per rank;
rank 0 prints the result. Everything else here works without torch.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmscale.cluster.doctor.facts import (
    DEFAULT_PORT,
    CheckRow,
    HostFacts,
    Interface,
    NetworkFacts,
    ProbeRequest,
    Route,
    differ,
    format_by_host,
    format_hosts,
    green,
    red,
    yellow,
)
from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.ranks import find_port
from llmscale.cluster.remote import HostRunner, process_limit
from llmscale.config.hardware import find_gpu
from llmscale.engine.network import NAMING_VARIABLES, named_interfaces, set_network_interface
from llmscale.untrusted.interpreter import module_command


def check_network(facts: Mapping[str, HostFacts], first_host: str, port: int) -> Iterator[CheckRow]:
    """Check that every host can be found and listens where the others look for it."""
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
                "Choose another one (--port here, --master_port for deepspeed), or end the process that uses it: "
                f"ss -ltnp 'sport = :{port}'",
            )


def _check_names(networks: Mapping[str, NetworkFacts]) -> Iterator[CheckRow]:
    """Check that every name means the same machine on all hosts, and not the asking host itself."""
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
                    f"on {host}, {peer} resolves to {route.address}, which is {host} itself",
                    f"Write {peer}'s address in /etc/hosts on {host}.",
                )
            elif route.source is None:
                sound = False
                yield red(
                    "names",
                    f"{host} has no route to {peer} ({route.address})",
                    f"Bring the interface up on {host} (ip link, ip route), or correct the address.",
                )
            elif route.address not in {interface.address for interface in networks[peer].interfaces}:
                sound = False
                yield yellow(
                    "names",
                    f"on {host}, {peer} resolves to {route.address}, but none of its interfaces has that address",
                    f"Correct it in /etc/hosts on {host} or in DNS, unless the network translates addresses.",
                )
    if sound:
        yield green("names", "every host resolves every other")


def _check_interfaces(networks: Mapping[str, NetworkFacts], first_host: str) -> Iterator[CheckRow]:
    """Check the interfaces that the ranks will listen on (llmscale.engine.network).

    That is the interface named by a variable, else the one towards the first host; on GPUs too, because control
    messages use gloo beside NCCL.
    """
    used: dict[str, object] = {}
    for host, network in networks.items():
        wrong = list(_check_named_interfaces(host, network))
        yield from wrong
        interface = _listening_interface(host, network, first_host)
        if wrong:
            continue
        if interface is None and host == first_host:
            yield red("interface", f"{host} has only loopback addresses", f"On {host}: ip addr, and bring one up.")
        if interface is None:
            continue  # the row about names explains it for every other host
        if interface.up:
            used[host] = interface.name
        else:
            yield red(
                "interface",
                f"{host}: {interface.name} ({interface.address}) is down",
                f"On {host}: ip link set {interface.name} up",
            )
    if len(used) == len(networks):
        yield green("interface", f"gloo and NCCL use {format_by_host(used)}")


def _check_named_interfaces(host: str, network: NetworkFacts) -> Iterator[CheckRow]:
    """Check the interfaces that variables name."""
    values = (network.gloo_interface, network.nccl_interface, network.tp_interface)
    named = dict(zip(NAMING_VARIABLES, values, strict=True))
    others = ", ".join(interface.name for interface in network.interfaces if interface.up and interface.address)
    for variable, name in named.items():
        selected = named_interfaces(variable, name or "", [interface.name for interface in network.interfaces])
        if selected is None:
            continue
        found = [interface for interface in network.interfaces if interface.name in selected]
        where, fix = f"{host}: {variable}={name}, but", f"Name one of {others}, or unset the variable"
        if not found:
            yield red("interface", f"{where} there is no such interface", f"{fix}.")
        elif not any(interface.up and interface.address for interface in found):
            fix = f"{fix}; or: ip link set {found[0].name} up"
            yield red("interface", f"{where} that is down or has no IPv4 address", fix)


def _listening_interface(host: str, network: NetworkFacts, first_host: str) -> Interface | None:
    """Return the interface of the first host's first address; on other hosts, the one that leads there."""
    if network.gloo_interface:
        wanted = network.gloo_interface.removeprefix("=").split(",")
        return next((interface for interface in network.interfaces if interface.name in wanted), None)
    if host == first_host:
        return network.interface_of(network.first_address)
    route = network.routes.get(first_host)
    if route is None or route.source is None or _is_loopback(route.source):
        return None
    return network.interface_of(route.source)


def _interface_to_peers(host: str, network: NetworkFacts) -> Interface | None:
    """Return the interface that leads to the first other host with a route."""
    for peer, route in network.routes.items():
        if peer != host and route.source and not _is_loopback(route.source):
            return network.interface_of(route.source)
    return None


def _check_mtu(networks: Mapping[str, NetworkFacts]) -> Iterator[CheckRow]:
    used = {host: found for host, network in networks.items() if (found := _interface_to_peers(host, network))}
    sizes = {host: interface.mtu for host, interface in used.items()}
    if differ(sizes):
        least = min(used.values(), key=lambda interface: interface.mtu)
        yield yellow(
            "mtu",
            f"largest packet: {format_by_host(sizes)}; large messages can hang between such hosts",
            "Set one MTU on all hosts and switches, at most the one that the network carries: "
            f"ip link set {least.name} mtu {least.mtu}",
        )
    elif sizes:
        yield green("mtu", format_by_host(sizes))


def _check_master(networks: Mapping[str, NetworkFacts], first_host: str) -> Iterator[CheckRow]:
    """Check that the others reach the first host by its first address (`hostname -I`), which deepspeed tells them."""
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
            f"the first address of {first_host} is {master.first_address}, {format_hosts(other)} reach it as {address}",
            f"Give deepspeed --master_addr {address}.",
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


# ---------------------------------------------------------------- facts of this host

_INFINIBAND = Path("/sys/class/infiniband")
#: ioctl numbers and a flag of Linux's <linux/sockios.h> and <net/if.h>.
_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFMTU, _IFF_UP = 0x8915, 0x8913, 0x8921, 0x1
_IFF_RUNNING = 0x40
_SIOCETHTOOL, _ETHTOOL_GSET = 0x8946, 0x1
#: Any port: connecting a UDP socket only chooses a route, it sends nothing.
_DISCARD_PORT = 9


def gather_network(request: ProbeRequest) -> NetworkFacts:
    """Return this host's view of itself and its peers."""
    hostname = socket.gethostname()
    interfaces = tuple(_describe_interface(name) for _, name in socket.if_nameindex())
    spare_port, taken = find_port(request.port)
    addresses = (found.address for found in interfaces if found.address and not _is_loopback(found.address))
    return NetworkFacts(
        hostname=hostname,
        hostname_address=_resolve(hostname),
        first_address=next(addresses, None),
        interfaces=interfaces,
        routes={peer: _find_route(peer) for peer in request.peers},
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME"),
        tp_interface=os.environ.get("TP_SOCKET_IFNAME"),
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
        with contextlib.suppress(OSError):  # it has no address
            address = socket.inet_ntoa(request(_SIOCGIFADDR)[4:8])
    up = bool(flags & _IFF_UP and flags & _IFF_RUNNING)
    return Interface(name, up, mtu, address, _link_speed(name))


def _link_speed(name: str) -> int | None:
    """Return the driver's bits per second, by ioctl because /sys may belong to another network namespace.

    None for an interface without a speed, such as a bridge or a tunnel.
    """
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
    """Return bits per second of every active port. A `rate` file reads like `400 Gb/sec (4X NDR)`."""
    rates = []
    for port in sorted(folder.glob("*/ports/*")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            layer = (port / "link_layer").read_text().strip()
            if "ACTIVE" in (port / "state").read_text() and layer == "InfiniBand":
                rates.append(int(float((port / "rate").read_text().split()[0]) * 10**9))
    return tuple(rates)


# ---------------------------------------------------------------- the measured all-reduce

#: Bandwidth below these fractions of the links' speed is red and yellow: the all-reduce takes another path.
SLOW_FAIL_FRAC, SLOW_WARN_FRAC = 0.1, 0.2
#: Most bytes/s that gloo reaches on any link: it copies through one core per rank.
GLOO_BYTES_PER_S = 1.25e9
_ALL_REDUCE_TIMEOUT_S = 60
#: Precedes the JSON of the result.
RESULT_MARK = "llmscale-all-reduce "
_RANK_VARIABLE = "LLMSCALE_ALL_REDUCE_RANK"
#: Buffers grow until one all-reduce takes this long, or up to these sizes.
_LONG_S = 0.25
_MAX_BYTES = {"gloo": 64 * 2**20, "nccl": 1024 * 2**20}
_FIRST_BYTES = 2**20
_REPEATS = 3
#: Seconds after the limit until the kernel kills the ranks, if they have not ended themselves.
_SPARE_S = 5


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
    """Median time of one all-reduce of 8 bytes."""

    @property
    def bus_bytes_per_s(self) -> float:
        """Return the bytes per second of each link in one direction.

        2 (N - 1) / N of the buffer passes each link (NVIDIA's nccl-tests, PERFORMANCE.md).
        """
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.seconds


_RESULT = TypeAdapter(AllReduceResult)


def measure_all_reduce(
    runner: HostRunner, hosts: Sequence[Host], facts: Mapping[str, HostFacts], promised: float | None
) -> CheckRow | None:
    """Time an all-reduce over all GPUs of the hosts with facts, or over one process per host without GPUs.

    `promised` is the network's bytes/s per host; None to take the speed of the links. None for a single rank.
    """
    ready = [host for host in hosts if host.name in facts]
    on_gpus = all(found.gpus and found.gpus.gpus for found in facts.values())
    ranks = {host.name: host.slots if on_gpus else 1 for host in ready}
    world_size = sum(ranks.values())
    if world_size < 2:
        return None
    backend, first_host = "nccl" if on_gpus else "gloo", ready[0].name
    master, port = _rendezvous(facts, first_host)
    arguments: dict[str, list[str]] = {}
    first_rank = 0
    for name, count in ranks.items():
        arguments[name] = [
            *("--backend", backend, "--master", master, "--port", str(port)),
            *("--first-rank", str(first_rank), "--ranks", str(count), "--world-size", str(world_size)),
            *("--timeout-s", str(_ALL_REDUCE_TIMEOUT_S)),
        ]
        first_rank += count
    answers = runner.modules("llmscale.cluster.doctor.network", arguments, _ALL_REDUCE_TIMEOUT_S + _SPARE_S + 10)
    failed = {name: answer.describe() for name, answer in answers.items() if answer.returncode}
    lines = [line for line in answers[first_host].stdout.splitlines() if line.startswith(RESULT_MARK)]
    if failed or not lines:
        return explain_failed_all_reduce(failed or {first_host: "no result"}, port)
    try:
        result = _RESULT.validate_json(lines[-1].removeprefix(RESULT_MARK))
        valid = min(result.seconds, result.latency_s, result.world_size) > 0
    except ValidationError:
        valid = False
    if not valid:
        return explain_failed_all_reduce({first_host: "an invalid result"}, port)
    return check_all_reduce(result, promised or promised_bytes_per_s(facts, backend))


def _rendezvous(facts: Mapping[str, HostFacts], first_host: str) -> tuple[str, int]:
    """Return the first host's first address, which deepspeed would take, and a port; loopback for a single host."""
    network = facts[first_host].network
    if network is None:
        return first_host, DEFAULT_PORT
    return (network.first_address or first_host) if len(facts) > 1 else "127.0.0.1", network.spare_port


def promised_bytes_per_s(facts: Mapping[str, HostFacts], backend: str) -> float | None:
    """Return the speed of the slowest host's links in one direction; None if neither driver nor table knows it.

    NCCL uses all InfiniBand ports, gloo the interface towards the other hosts. Within one host it is the link of the
    hardware table.
    """
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
        interface = _interface_to_peers(host, found.network)
        if interface and interface.bits_per_s:
            promises.append(interface.bits_per_s / 8)
    if not promises:
        return None
    return min(*promises, GLOO_BYTES_PER_S) if backend == "gloo" else min(promises)


def check_all_reduce(result: AllReduceResult, promised_bytes_per_s: float | None) -> CheckRow:
    """Compare the bus bandwidth with the speed of the links (bytes/s, one direction)."""
    measured = result.bus_bytes_per_s
    found = (
        f"{_format_speed(measured)} over {result.world_size} ranks on {result.backend} "
        f"({result.num_bytes / 2**20:.0f} MiB in {result.seconds * 1e3:.0f} ms, "
        f"latency {result.latency_s * 1e3:.2f} ms)"
    )
    if promised_bytes_per_s is None:
        return green("all-reduce", found)
    found += f"; the links promise {_format_speed(promised_bytes_per_s)}"
    frac = measured / promised_bytes_per_s
    if frac >= SLOW_WARN_FRAC:
        return green("all-reduce", found)
    fix = "Check which interface it uses (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and test the link with iperf3."
    if result.backend == "nccl":
        fix = "NCCL_DEBUG=INFO prints the network that it uses (NET/IB or NET/Socket); ibstat and ethtool show links."
    return (red if frac < SLOW_FAIL_FRAC else yellow)("all-reduce", found, fix)


def _format_speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


def explain_failed_all_reduce(reasons: Mapping[str, str], port: int) -> CheckRow:
    """Return the row for ranks that did not meet or did not finish; `reasons` has the last line of each host."""
    return red(
        "all-reduce",
        f"did not finish: {format_by_host(reasons)}",
        f"Open all TCP ports between the hosts (firewalld, ufw, security groups; not only {port}: the ranks connect to "
        "each other on any port), or name the interface: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=...",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Start this host's ranks of the all-reduce, or be one of them (its variable is set)."""
    parser = argparse.ArgumentParser(description="Time an all-reduce over several hosts.")
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--master", required=True, help="address of the first host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this host")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--timeout-s", type=int, default=_ALL_REDUCE_TIMEOUT_S)
    args = parser.parse_args(argv)
    with process_limit(args.timeout_s + _SPARE_S):
        if _RANK_VARIABLE in os.environ:
            _exit_after(args.timeout_s)
            _time_all_reduce(args, int(os.environ[_RANK_VARIABLE]))
            return 0
        return _start_ranks(args, list(sys.argv[1:] if argv is None else argv))


def _exit_after(seconds: float) -> None:
    """End this process with an error message when time is up.

    A thread does it, because the rendezvous keeps the main thread outside of Python.
    """

    def give_up() -> None:
        print(f"the ranks did not finish within {seconds:.0f} s", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()


def _start_ranks(args: argparse.Namespace, argv: list[str]) -> int:
    """Run this host's ranks as children. Their alarm ends them even if this process is killed."""
    children = [
        subprocess.Popen(
            module_command("llmscale.cluster.doctor.network", *argv),
            env={**os.environ, _RANK_VARIABLE: str(args.first_rank + local)},
        )
        for local in range(args.ranks)
    ]
    codes = [child.wait() for child in children]
    return int(any(codes))


def _time_all_reduce(args: argparse.Namespace, rank: int) -> None:
    """Join the other ranks, measure, and print the result on rank 0. Imports torch. Collective."""
    import torch
    import torch.distributed as dist

    # The interface that a run's ranks would use.
    os.environ["MASTER_ADDR"] = args.master
    set_network_interface()
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", rank - args.first_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        args.backend,
        init_method=f"tcp://{args.master}:{args.port}",
        rank=rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=args.timeout_s),
    )

    def reduce_once(num_bytes: int) -> float:
        """Return the seconds of one all-reduce on the slowest rank."""
        buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    num_bytes = _FIRST_BYTES
    while reduce_once(num_bytes) < _LONG_S and num_bytes < _MAX_BYTES[args.backend]:
        num_bytes *= 4
    num_bytes = min(num_bytes, _MAX_BYTES[args.backend])
    seconds = statistics.median(reduce_once(num_bytes) for _ in range(_REPEATS))
    latency_s = statistics.median(reduce_once(8) for _ in range(5 * _REPEATS))
    if rank == 0:
        result = {
            "backend": args.backend,
            "world_size": args.world_size,
            "num_bytes": num_bytes,
            "seconds": seconds,
            "latency_s": latency_s,
        }
        print(RESULT_MARK + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
