"""The network between nodes: the interface that ranks use. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence

import psutil

from llmscale.error_handling import say
from llmscale.errors import ConfigError

#: Variables that tell gloo and NCCL which interface to use.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: Further ones that name interfaces: torch's RPC.
NAMING_VARIABLES = (*VARIABLES, "TP_SOCKET_IFNAME")
#: Address that other machines cannot reach.
LOOPBACK = "127.0.0.1"
#: Device files of machines with GPUs, where NCCL is used.
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")


def set_network_interface() -> None:
    """Select the interface that leads to MASTER_ADDR, on one machine loopback, unless the user has selected one.

    By default gloo announces the address of the host's own name. On Debian and its relatives that is 127.0.1.1: every
    other host then connects to itself, and the run hangs or fails at its first collective.
    """
    if is_one_machine(os.environ):
        # NCCL finds its way within a machine itself.
        os.environ.setdefault(VARIABLES[0], interface_towards(LOOPBACK) or "lo")
        return
    name = interface_towards(os.environ["MASTER_ADDR"])
    if name is not None and name != "lo":
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)


def is_one_machine(variables: Mapping[str, str]) -> bool:
    """Return whether all ranks of a run are on this machine, by the variables of their launcher."""
    return variables.get("WORLD_SIZE", "1") == variables.get("LOCAL_WORLD_SIZE", "")


def check_interfaces(variables: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable names no interface of this host; where nothing reads it, warn."""
    with_address = (socket.AF_INET, socket.AF_INET6)
    listed = psutil.net_if_addrs().items()
    names = [name for name, addresses in listed if any(address.family in with_address for address in addresses)]
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


def find_port() -> int:
    """Return a TCP port of this host that nobody listens at, on any address.

    Another program may still take it before the ranks do: they fail at once, and the next attempt asks again.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` of all addresses, as torch's store does."""
    with socket.socket() as probe:
        # torch sets it too: connections that linger from an earlier attempt do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
        return True
