"""Hosts that cannot be reached, whose clock is wrong, or whose probe does not run: red rows with the fix."""

from __future__ import annotations

import pytest

from llmscale.cluster.doctor.facts import worst
from llmscale.cluster.doctor.software import (
    ClockReading,
    check_clocks,
    check_probes,
    check_reach,
)
from llmscale.cluster.remote import Finished


def ssh(stderr: str, code: int = 255) -> Finished:
    return Finished(code, "", stderr, 1.0)


@pytest.mark.parametrize(
    ("answer", "found", "fix"),
    [
        (
            ssh("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."),
            "not the one",
            "-R b",
        ),
        (ssh("No ED25519 host key is known\nHost key verification failed."), "not known here", "ssh-keyscan -H b"),
        (ssh("root@b: Permission denied (publickey)."), "does not accept your key", "ssh-copy-id b"),
        (ssh("ssh: Could not resolve hostname b: Name or service not known"), "does not resolve", "/etc/hosts"),
        (ssh("ssh: connect to host b port 22: Connection refused"), "no ssh server", "systemctl start ssh"),
        (ssh("ssh: connect to host b port 22: No route to host"), "no network path to it", "open port 22"),
        (ssh("ssh: connect to host b port 22: Connection timed out"), "no network path to it", "open port 22"),
        (ssh("kex_exchange_identification: Connection closed by remote host"), "closes the connection", "MaxStartups"),
        (ssh("", 124), "no answer within 1 s", "Log in by hand"),
        (ssh("bash: date: command not found", 127), "`ssh b date` failed", "Log in by hand"),
    ],
)
def test_a_host_that_ssh_does_not_reach(answer: Finished, found: str, fix: str) -> None:
    rows = list(check_reach({"a": Finished(0, "1\n", "", 0.1), "b": answer}))
    assert [row.status for row in rows] == ["ok", "fail"]
    assert rows[0].found.startswith("1 of 2 hosts")
    assert rows[1].found.startswith("b: ")
    assert found in rows[1].found
    assert fix in rows[1].fix


@pytest.mark.parametrize(
    ("offset_s", "uncertainty_s", "status"),
    [(0.1, 0.2, "ok"), (4.0, 3.5, "ok"), (-2.0, 0.2, "warn"), (30.0, 0.2, "fail"), (-30.0, 0.2, "fail")],
)
def test_clocks(offset_s: float, uncertainty_s: float, status: str) -> None:
    rows = list(check_clocks({"a": ClockReading(0.0, 0.1), "b": ClockReading(offset_s, uncertainty_s)}))
    assert worst(rows) == status
    if status != "ok":
        assert f"b is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this machine" in rows[0].found
        assert "set-ntp" in rows[0].fix


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("/env/bin/python: No module named llmscale", "same path on every host"),
        ("the probe is that of another llmscale (2 facts differ)", "same path on every host"),
        ("no answer within 90 s", "stuck disk or driver"),
        ("Segmentation fault", "llmscale.cluster.doctor.diagnose"),
    ],
)
def test_a_probe_that_did_not_run(problem: str, fix: str) -> None:
    (row,) = check_probes({"b": problem})
    assert row.status == "fail"
    assert problem in row.found
    assert fix in row.fix
