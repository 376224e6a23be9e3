"""Named networks between nodes, with the bandwidth for each GPU. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean


@dataclass(frozen=True)
class Interconnect:
    """A network between nodes. Rates are those of the line; planning/ estimates what collectives reach."""

    name: str
    """Name on the command line."""
    bytes_per_s: float
    """Bandwidth in one direction, per GPU, or per node if `per_node`."""
    per_node: bool
    """True if a node's GPUs share one adapter."""
    latency_s: float
    """Time of one message to a neighbour; the technology's order of magnitude, not measured."""
    description: str

    def bytes_per_s_per_node(self, gpus_per_node: int) -> float:
        """Return the bandwidth of all adapters of a node in one direction."""
        return self.bytes_per_s if self.per_node else self.bytes_per_s * gpus_per_node


def _gigabits(rate: float) -> float:
    return rate * 1e9 / 8


#: DGX and HGX nodes have one adapter per GPU.
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
    """Return the network of that name. Raises ConfigError with the closest and all legal names."""
    for interconnect in INTERCONNECTS:
        if interconnect.name == name.lower():
            return interconnect
    names = [interconnect.name for interconnect in INTERCONNECTS]
    raise ConfigError(
        f"interconnect '{name}' is not known.{did_you_mean(name.lower(), names)} Legal: {', '.join(names)}."
    )
