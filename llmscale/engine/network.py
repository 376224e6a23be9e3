"""The network between nodes: the interface that ranks use, and its speed. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from llmscale.config.hardware import Interconnect
from llmscale.error_handling import say
from llmscale.errors import ConfigError
from llmscale.untrusted.paths import is_plain_name

#: Variables that tell gloo and NCCL which interface to use.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: Further ones that name interfaces: torch's RPC.
NAMING_VARIABLES = (*VARIABLES, "TP_SOCKET_IFNAME")
#: Device files of machines with GPUs, where NCCL is used.
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
#: Seconds that a message to a neighbour takes: the technology's order of magnitude (llmscale.config.hardware).
_ADAPTER_LATENCY_S, _SOCKET_LATENCY_S = 5e-6, 50e-6


def set_network_interface() -> None:
    """Select the interface that leads to MASTER_ADDR, unless the user has selected one.

    By default gloo announces the address of the host's own name. On Debian and its relatives that is 127.0.1.1: every
    other host then connects to itself, and the run hangs or fails at its first collective.
    """
    name = interface_towards(os.environ["MASTER_ADDR"])
    if name is not None and name != "lo":
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)


def check_interfaces(variables: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable names no interface of this host; where nothing reads it, warn."""
    names = usable_interfaces()
    for variable in NAMING_VARIABLES:
        value = variables.get(variable, "")
        if not lacks_interface(variable, value, names):
            continue
        words = (
            f"{variable} is '{value}', and {socket.gethostname()} has no such network interface with an address. "
            f"It has {', '.join(names)}. Name one of them, or `unset {variable}`"
        )
        if variable == VARIABLES[0] or any(map(os.path.exists, _GPU_FILES)):
            raise ConfigError(f"{words}.")
        if variables.get("LOCAL_RANK", "0") == "0":
            say(f"WARNING: {words}. Nothing reads it in a run on CPUs.")


def named_interfaces(variable: str, value: str, names: Iterable[str]) -> list[str] | None:
    """Return which of the interfaces `names` a variable's value selects; None if it selects by exclusion or not at all.

    NCCL's holds prefixes, or begins with = (exact) or ^ (all except). The others hold exact names.
    """
    if not value.strip() or (variable == VARIABLES[1] and value.startswith("^")):
        return None
    is_prefix = variable == VARIABLES[1] and not value.startswith("=")
    # NCCL may add a port, as in eth0:5000.
    wanted = [word.strip().partition(":")[0] for word in value.removeprefix("=").split(",") if word.strip()]
    return [name for name in names if (name.startswith(tuple(wanted)) if is_prefix else name in wanted)]


def lacks_interface(variable: str, value: str, names: Sequence[str]) -> bool:
    """Return whether a variable selects none of the interfaces `names`, or gloo's one that is not among them."""
    if variable == VARIABLES[0]:  # gloo opens each
        return any(word.strip() not in names for word in value.split(",") if word.strip())
    return named_interfaces(variable, value, names) == []


def usable_interfaces() -> list[str]:
    """Return the names of the interfaces that have an address."""
    families = (socket.AF_INET, socket.AF_INET6)
    listed = psutil.net_if_addrs().items()
    return [name for name, addresses in listed if any(address.family in families for address in addresses)]


def interface_towards(host: str) -> str | None:
    """Return the interface that packets to `host` leave from.

    None when it is unknown: no route, a name that does not resolve, or IPv6.
    """
    try:
        address = source_address(host)
        return next((name for name, own in interface_addresses() if own == address), None)
    except OSError:
        return None


def source_address(host: str) -> str:
    """Return this machine's IPv4 address that packets to `host` leave from. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; the kernel only picks the route.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_addresses() -> list[tuple[str, str]]:
    """Return name and address of every interface with an IPv4 address."""
    listed = psutil.net_if_addrs().items()
    return [(name, one.address) for name, addresses in listed for one in addresses if one.family == socket.AF_INET]


def find_node_network(sys_class: Path = Path("/sys/class")) -> Interconnect | None:
    """Return this node's link to the others: all active ports of InfiniBand, RoCE and similar adapters.

    Without such ports, or with NCCL_IB_DISABLE=1, the interface of NCCL's sockets. None where neither reports a speed,
    as on virtual machines.
    """
    adapters = 0.0 if os.environ.get("NCCL_IB_DISABLE") == "1" else sum(_port_rates(sys_class / "infiniband"))
    rate, latency_s = adapters, _ADAPTER_LATENCY_S
    if not adapters:
        rate, latency_s = _interface_rate(sys_class / "net"), _SOCKET_LATENCY_S
    if not rate:
        return None
    return Interconnect("this node's", rate, True, latency_s, f"{8 * rate / 1e9:.0f} Gbit/s per node")


def _port_rates(adapters: Path) -> Iterator[float]:
    """Yield bytes per second of each active port: `rate` holds `400 Gb/sec (4X NDR)`, `state` `4: ACTIVE`."""
    selection = os.environ.get("NCCL_IB_HCA", "")
    for port in adapters.glob("*/ports/*"):
        if _is_selected(port.parts[-3], port.name, selection) and "ACTIVE" in _read(port / "state"):
            yield _number(_read(port / "rate").partition(" Gb/sec")[0]) * 1e9 / 8


def _is_selected(adapter: str, port: str, selection: str) -> bool:
    """Return whether NCCL_IB_HCA lets NCCL use a port.

    The variable lists prefixes of names, perhaps with `:PORT`. A leading `=` asks for exact names, `^` for all others.
    """
    named = selection.lstrip("^=")
    if not named:
        return True
    entries = [entry.strip().partition(":")[::2] for entry in named.split(",")]
    is_exact = "=" in selection[:2]
    is_named = any(
        (adapter == name if is_exact else adapter.startswith(name)) and number in ("", port) for name, number in entries
    )
    return is_named != selection.startswith("^")


def _interface_rate(interfaces: Path) -> float:
    """Return bytes per second of the interface selected for NCCL or gloo; 0 where it is unknown."""
    for variable in reversed(VARIABLES):
        name = os.environ.get(variable, "")
        if is_plain_name(name) and (interfaces / name).exists():
            # In Mbit/s; -1 where the driver does not know it.
            return max(0.0, _number(_read(interfaces / name / "speed"))) * 1e6 / 8
    return 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
