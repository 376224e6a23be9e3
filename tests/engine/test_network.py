from __future__ import annotations

import os
import socket

import pytest

from llmscale.engine import network
from llmscale.engine.network import (
    VARIABLES,
    check_interfaces,
    find_port,
    interface_addresses,
    interface_towards,
    is_free,
    named_interfaces,
    set_network_interface,
)
from llmscale.errors import ConfigError


@pytest.mark.parametrize(
    ("variable", "value", "selected"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ["eth0"]),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", ["eth0", "ib0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0", "eth1"]),
        ("NCCL_SOCKET_IFNAME", "=eth", []),
        ("NCCL_SOCKET_IFNAME", "=eth1,ib0:5000", ["eth1", "ib0"]),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", None),
        ("TP_SOCKET_IFNAME", "wlan0", []),
        ("GLOO_SOCKET_IFNAME", "", None),
    ],
)
def test_what_a_variable_selects(variable: str, value: str, selected: list[str] | None) -> None:
    assert named_interfaces(variable, value, ["lo", "eth0", "eth1", "ib0"]) == selected


def test_a_variable_that_names_no_interface_is_refused_with_those_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gloo's own error was explained by a firewall."""
    check_interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^lo"})
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME is 'eth9'.* It has .*lo.*unset GLOO_SOCKET_IFNAME"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "eth9"})
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME is 'lo,eth9'"):  # gloo opens each
        check_interfaces({"GLOO_SOCKET_IFNAME": "lo,eth9"})
    monkeypatch.setattr(network, "_GPU_FILES", ())
    check_interfaces({"NCCL_SOCKET_IFNAME": "eth9"})
    assert "WARNING: NCCL_SOCKET_IFNAME is 'eth9'" in capsys.readouterr().err
    monkeypatch.setattr(network, "_GPU_FILES", ("/dev/null",))
    for variable in ("NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        with pytest.raises(ConfigError, match=f"{variable} is 'eth9'"):
            check_interfaces({variable: "eth9"})


def test_loopback_leads_to_loopback() -> None:
    assert ("lo", "127.0.0.1") in interface_addresses()
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None


def test_every_interface_leads_to_its_own_address() -> None:
    for name, address in interface_addresses():
        assert interface_towards(address) == name


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "no-such-host.invalid"])
@pytest.mark.parametrize("local", ["2", "1"])
def test_a_run_on_one_host_uses_loopback_alone(monkeypatch: pytest.MonkeyPatch, master: str, local: str) -> None:
    for variable in VARIABLES:
        # Set first, so that monkeypatch also removes what the function under test adds.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    set_network_interface()
    chosen = {variable: os.environ[variable] for variable in VARIABLES if variable in os.environ}
    assert chosen == ({"GLOO_SOCKET_IFNAME": "lo"} if local == "2" else {})


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


def test_a_free_port() -> None:
    port = find_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
