from __future__ import annotations

import pytest

from llmscale.config.hardware import get_interconnect
from llmscale.errors import ConfigError


def test_a_rail_per_gpu_adds_up() -> None:
    # A DGX H100 has 8 adapters of 400 Gbit/s.
    assert get_interconnect("ib-400g").bytes_per_s_per_node(8) == 8 * 50e9


def test_one_adapter_per_node_does_not_grow_with_its_gpus() -> None:
    assert get_interconnect("ethernet-25g").bytes_per_s_per_node(8) == pytest.approx(25e9 / 8)


def test_a_misspelt_network_names_the_closest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"'ib-400' is not known\. Did you mean 'ib-400g'\? Legal: .*ethernet-10g"):
        get_interconnect("ib-400")
