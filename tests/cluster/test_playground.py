"""The hosts that the other tests break must themselves be right, and must leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from scripts.playground.hosts import Playground
from scripts.playground.kernel import all_pids, pid_space


def test_each_host_has_its_own_name_address_processes_and_tmp(make_playground: Callable[..., Playground]) -> None:
    hosts = make_playground(3).hosts
    for host in hosts:
        assert host.run(["hostname", "-I"]).stdout.split() == [host.address]
        assert host.run(["getent", "ahostsv4", host.name]).stdout.split()[0] == "127.0.1.1"
        host.run(["touch", f"/tmp/of-{host.name}", f"/dev/shm/of-{host.name}"])
        assert host.run(["sh", "-c", "cd /tmp; ls of-*; ls /dev/shm"]).stdout.split() == [f"of-{host.name}"] * 2
    assert hosts[0].run(["ssh", "node-2", "hostname"]).stdout == "node-2\n"
    lines = hosts[0].run(["pdsh", "-R", "ssh", "-w", "node-[0-2]", "hostname"]).stdout.splitlines()
    assert sorted(lines) == [f"node-{i}: node-{i}" for i in range(3)]
    assert not list(Path("/tmp").glob("of-node-*"))


def test_nothing_is_left(make_playground: Callable[..., Playground]) -> None:
    playground = make_playground(2)
    host = playground.hosts[0]
    host.popen(["setsid", "sleep", "1000"]).poll()
    spaces = {pid_space(host.init_pid) for host in playground.hosts}
    assert None not in spaces
    playground.down()
    assert not [pid for pid in all_pids() if pid_space(pid) in spaces]
    assert not [mount for mount in Path("/proc/mounts").read_text().splitlines() if str(playground.folder) in mount]
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("to-node")]
