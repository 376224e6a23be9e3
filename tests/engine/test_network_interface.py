from __future__ import annotations

import os

import pytest

from llmscale.engine.network import VARIABLES, interface_addresses, interface_towards, set_network_interface


def test_loopback_leads_to_loopback() -> None:
    assert ("lo", "127.0.0.1") in interface_addresses()
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None


def test_every_interface_leads_to_its_own_address() -> None:
    for name, address in interface_addresses():
        assert interface_towards(address) == name


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_a_run_on_one_host_needs_no_interface(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MASTER_ADDR", master)
    set_network_interface()
    assert not [variable for variable in VARIABLES if variable in os.environ]


def test_the_users_word_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [address for name, address in interface_addresses() if name != "lo"]
    if not outside:
        pytest.skip("this machine has no network")
    monkeypatch.setenv("MASTER_ADDR", outside[0])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    set_network_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == interface_towards(outside[0])
