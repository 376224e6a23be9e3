from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmscale.engine import network
from llmscale.engine.network import (
    VARIABLES,
    check_interfaces,
    find_node_network,
    interface_addresses,
    interface_towards,
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


@pytest.fixture
def sys_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As the kernel has it on a host with four adapters, one of them not plugged in, and an interface of 25 Gbit/s."""
    for variable in (*VARIABLES, "NCCL_IB_DISABLE", "NCCL_IB_HCA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    for name, state in (
        ("mlx5_0", "4: ACTIVE"),
        ("mlx5_1", "4: ACTIVE"),
        ("mlx5_2", "4: ACTIVE"),
        ("mlx5_3", "1: DOWN"),
    ):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (tmp_path / "net" / "eth0").mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "speed").write_text("25000\n")
    return tmp_path


def test_adapters_that_are_up_add_up(sys_class: Path) -> None:
    network = find_node_network(sys_class)
    assert network is not None
    assert network.bytes_per_s_per_node(8) == pytest.approx(3 * 25e9)
    assert network.description == "600 Gbit/s per node"


@pytest.mark.parametrize(
    ("wanted", "adapters"),
    [
        ("mlx5", 3),
        ("mlx5_0,mlx5_1:1", 2),
        ("=mlx5_0", 1),
        ("^mlx5_0", 2),
        ("^=mlx5_0,mlx5_1", 1),
        ("mlx5_0:2,mlx5_1", 1),
    ],
)
def test_only_those_count_that_nccl_may_use(
    sys_class: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, adapters: int
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", wanted)
    network = find_node_network(sys_class)
    assert network is not None
    assert network.bytes_per_s_per_node(8) == pytest.approx(adapters * 25e9)


def test_without_them_it_is_the_interface_of_the_sockets(sys_class: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    network = find_node_network(sys_class)
    assert network is not None
    assert network.bytes_per_s_per_node(8) == pytest.approx(25e9 / 8)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker,lo")
    assert find_node_network(sys_class) == network, "a pattern names no interface"


@pytest.mark.parametrize("speed", ["-1", ""])
def test_what_the_kernel_does_not_know_is_not_guessed(
    sys_class: Path, monkeypatch: pytest.MonkeyPatch, speed: str
) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    (sys_class / "net" / "eth0" / "speed").write_text(speed)
    assert find_node_network(sys_class) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "../../etc")
    assert find_node_network(sys_class) is None
    assert find_node_network(sys_class / "nowhere") is None
