"""How fast the network between nodes is, as far as the kernel knows. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llmscale.config.interconnect import Interconnect
from llmscale.engine.network_interface import VARIABLES
from llmscale.untrusted.paths import is_plain_name

#: Of a message to a neighbour: the order of magnitude of the technology (llmscale.config.interconnect).
_ADAPTER_LATENCY_S, _SOCKET_LATENCY_S = 5e-6, 50e-6


def find_node_network(sys_class: Path = Path("/sys/class")) -> Interconnect | None:
    """This node's: all ports of InfiniBand, RoCE and their like that are up, or where there are none, or NCCL is told
    to leave them alone (NCCL_IB_DISABLE), the interface of its sockets. None where neither says its speed, as a
    virtual machine's does not."""
    adapters = 0.0 if os.environ.get("NCCL_IB_DISABLE") == "1" else sum(_port_rates(sys_class / "infiniband"))
    rate, latency_s = adapters, _ADAPTER_LATENCY_S
    if not adapters:
        rate, latency_s = _interface_rate(sys_class / "net"), _SOCKET_LATENCY_S
    if not rate:
        return None
    words = f"{8 * rate / 1e9:.0f} Gbit/s per node"
    return Interconnect("this node's", rate, True, latency_s, words)


def _port_rates(adapters: Path) -> Iterator[float]:
    """Bytes per second of each port that is up: `rate` holds `400 Gb/sec (4X NDR)`, `state` `4: ACTIVE`."""
    wanted = os.environ.get("NCCL_IB_HCA", "")
    for port in adapters.glob("*/ports/*"):
        if _is_wanted(port.parts[-3], port.name, wanted) and "ACTIVE" in _read(port / "state"):
            yield _number(_read(port / "rate").partition(" Gb/sec")[0]) * 1e9 / 8


def _is_wanted(adapter: str, port: str, wanted: str) -> bool:
    """Whether NCCL_IB_HCA lets NCCL use a port: a list of beginnings of names, perhaps with `:PORT`; `=` before it asks
    for whole names, `^` for all others."""
    named = wanted.lstrip("^=")
    if not named:
        return True
    entries = [entry.strip().partition(":")[::2] for entry in named.split(",")]
    is_exact = "=" in wanted[:2]
    is_named = any(
        (adapter == name if is_exact else adapter.startswith(name)) and number in ("", port) for name, number in entries
    )
    return is_named != wanted.startswith("^")


def _interface_rate(interfaces: Path) -> float:
    """Bytes per second of the interface that NCCL or gloo was told to use; 0 where it is not known. `speed` is in
    Mbit/s, and -1 where the driver does not know it."""
    for variable in reversed(VARIABLES):
        name = os.environ.get(variable, "")
        if is_plain_name(name) and (interfaces / name).exists():
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
