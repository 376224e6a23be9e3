"""Money and energy of GPU-hours. No torch."""

from __future__ import annotations

#: Power that a data centre draws per watt of its computers. An assumption: good ones are at 1.1, the average near 1.6.
DEFAULT_PUE = 1.2


def price_usd(hours: float, price_per_gpu_hour: float) -> float:
    """GPU-hours times the price of one."""
    return hours * price_per_gpu_hour


def energy_kwh(hours: float, power_w: float, pue: float = DEFAULT_PUE) -> float:
    """GPU-hours at the boards' power limit, and the data centre's overhead; hosts and network are not counted."""
    return hours * power_w * pue / 1000
