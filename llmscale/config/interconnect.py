"""Named networks between nodes: what each GPU gets of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean


@dataclass(frozen=True)
class Interconnect:
    """The network between nodes. Rates are the line's; what a collective reaches is the throughput model's matter."""

    name: str
    """The command line's word for it."""
    bytes_per_s: float
    """In one direction: per GPU, or for the whole node where `per_node`."""
    per_node: bool
    """The node's GPUs share one adapter."""
    latency_s: float
    """One message to a neighbour; the order of magnitude of the technology, not a measurement."""
    description: str

    def bytes_per_s_per_node(self, gpus_per_node: int) -> float:
        """All adapters of a node together, in one direction."""
        return self.bytes_per_s if self.per_node else self.bytes_per_s * gpus_per_node


def _gigabits(rate: float) -> float:
    return rate * 1e9 / 8


#: A rail per GPU is what DGX and HGX nodes have: 8 adapters for 8 GPUs.
INTERCONNECTS = (
    Interconnect("ib-800g", _gigabits(800), False, 2e-6, "InfiniBand XDR, 800 Gbit/s per GPU"),
    Interconnect("ib-400g", _gigabits(400), False, 2e-6, "InfiniBand NDR, 400 Gbit/s per GPU (DGX H100, H200)"),
    Interconnect("ib-200g", _gigabits(200), False, 2e-6, "InfiniBand HDR, 200 Gbit/s per GPU (DGX A100)"),
    Interconnect("ib-100g", _gigabits(100), False, 2e-6, "InfiniBand EDR, 100 Gbit/s per GPU"),
    Interconnect("roce-400g", _gigabits(400), False, 5e-6, "RoCE, 400 Gbit/s per GPU"),
    Interconnect("roce-200g", _gigabits(200), False, 5e-6, "RoCE, 200 Gbit/s per GPU (1600 Gbit/s for 8 GPUs)"),
    Interconnect("roce-100g", _gigabits(100), True, 5e-6, "RoCE, one adapter of 100 Gbit/s per node"),
    Interconnect("ethernet-100g", _gigabits(100), True, 50e-6, "TCP, 100 Gbit/s per node"),
    Interconnect("ethernet-25g", _gigabits(25), True, 50e-6, "TCP, 25 Gbit/s per node"),
    Interconnect("ethernet-10g", _gigabits(10), True, 50e-6, "TCP, 10 Gbit/s per node"),
    Interconnect("ethernet-1g", _gigabits(1), True, 100e-6, "TCP, 1 Gbit/s per node"),
)


def get_interconnect(name: str) -> Interconnect:
    """The network of that name. Raises ConfigError naming the closest and all legal names."""
    for interconnect in INTERCONNECTS:
        if interconnect.name == name.lower():
            return interconnect
    names = [interconnect.name for interconnect in INTERCONNECTS]
    raise ConfigError(
        f"interconnect '{name}' is not known.{did_you_mean(name.lower(), names)} Legal: {', '.join(names)}."
    )
