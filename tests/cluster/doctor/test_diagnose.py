"""The doctor as a whole, on hosts that answer as they are told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmscale.cli.doctor import table_lines
from llmscale.cli.main import main
from llmscale.cluster.doctor.diagnose import Diagnosis, DoctorOptions, _run_groups, diagnose
from llmscale.cluster.doctor.report import HostReport, green, print_report, red, yellow
from llmscale.cluster.remote import Finished, HostRunner, run_on_hosts
from tests.conftest import HANG_S, REPOSITORY

HEALTHY_RESULT = {"backend": "gloo", "world_size": 2, "num_bytes": 2**26, "seconds": 0.06}
PROBE, ALL_REDUCE = "llmscale.cluster.doctor.diagnose", "llmscale.cluster.doctor.all_reduce"


class Cluster:
    """Stands in for ssh: a pair of hosts with given reports."""

    def __init__(self, **reports: HostReport) -> None:
        healthy = HostReport((green("port", "free"),), address="10.0.0.1", folder="/shared/run")
        self.reports = {"node-0": healthy, "node-1": healthy} | {
            name.replace("_", "-"): report for name, report in reports.items()
        }
        self.failing: dict[str, Finished] = {}
        self.sees_file = True
        self.all_reduce = Finished(0, f"llmscale-all-reduce {json.dumps(HEALTHY_RESULT)}", "", 1.0)
        self.asked: list[tuple[str, str]] = []

    def run(
        self, hosts: Sequence[str], argv: Sequence[str], *, timeout_s: float, stdin: str | None = None
    ) -> dict[str, Finished]:
        line = " ".join(argv)
        self.asked += [(host, line) for host in hosts]
        return {host: self._answer(host, line) for host in hosts}

    def _answer(self, host: str, line: str) -> Finished:
        if PROBE in line:
            return self.failing.get(host, Finished(0, print_report(self.reports[host]), "", 0.5))
        if ALL_REDUCE in line:
            return self.all_reduce
        if "touch" in line:
            return Finished(0, "/shared", "", 0.1)
        return Finished(int("exit 1" in line and not self.sees_file), "", "", 0.1)

    def lines(self, word: str) -> dict[str, str]:
        return {host: line for host, line in self.asked if word in line}


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("node-0 slots=1\nnode-1 slots=1\n")
    return path


def ask(cluster: Cluster, hostfile: Path, **question: object) -> Diagnosis:
    return diagnose(DoctorOptions(hostfile=hostfile, **question), HostRunner(cluster.run))  # type: ignore[arg-type]


def row_of(diagnosis: Diagnosis, name: str) -> tuple[str, str]:
    (row,) = [row for row in diagnosis.rows if row.name == name]
    return row.status, row.found


def test_a_healthy_pair(hostfile: Path) -> None:
    diagnosis = ask(Cluster(), hostfile)
    assert [row for row in diagnosis.rows if row.status != "ok"] == []
    assert {"reach", "port", "run folder", "all-reduce"} == {row.name for row in diagnosis.rows}


@pytest.mark.parametrize(
    ("answer", "found", "fix"),
    [
        (Finished(255, "", "root@node-1: Permission denied (publickey).", 1.0), "Permission denied", "copy your key"),
        (Finished(124, "", "", 90.0), "no answer within 90 s", "stuck disk or driver"),
        (Finished(1, "", "/env/bin/python: No module named llmscale", 1.0), "No module named", "same path"),
        (Finished(0, "Welcome", "", 1.0), "printed no report", "same path"),
    ],
)
def test_a_host_without_an_answer_does_not_hide_the_others(
    answer: Finished, found: str, fix: str, hostfile: Path
) -> None:
    cluster = Cluster(node_0=HostReport((red("open files", "the limit is 100", "ulimit -n 65536"),)))
    cluster.failing["node-1"] = answer
    rows = {row.name: row for row in ask(cluster, hostfile).rows if row.status == "fail"}
    assert set(rows) == {"reach", "open files"}
    assert rows["reach"].found.startswith("node-1: ") and found in rows["reach"].found
    assert fix in rows["reach"].fix
    assert cluster.lines(ALL_REDUCE) == {}, "one host has nobody to exchange data with"


def test_rows_go_from_green_to_red(hostfile: Path) -> None:
    rows = (red("a", "x", "y"), green("b", "x"), yellow("c", "x", "y"))
    statuses = [row.status for row in ask(Cluster(node_0=HostReport(rows)), hostfile).rows]
    assert statuses == sorted(statuses, key=("ok", "warn", "fail").index)
    assert {"ok", "warn", "fail"} == set(statuses)


def test_the_file_written_to_find_out_what_is_shared_is_removed(hostfile: Path) -> None:
    cluster = Cluster()
    cluster.sees_file = False
    status, found = row_of(ask(cluster, hostfile), "run folder")
    assert status == "warn" and "is not there on node-1" in found
    name = cluster.lines("touch")["node-0"].split()[-1]
    assert cluster.lines("rm -f")["node-0"].endswith(f"/shared {name}")


def test_no_network_test_is_run_when_it_cannot_work(hostfile: Path) -> None:
    cluster = Cluster(node_1=HostReport((red("imports", "ImportError: libtorch.so", "Repair it."),)))
    diagnosis = ask(cluster, hostfile)
    (row,) = [row for row in diagnosis.rows if row.name == "all-reduce"]
    assert (row.status, row.fix) == ("warn", "First repair: imports.")
    assert cluster.lines(ALL_REDUCE) == {}
    assert "all-reduce" not in {row.name for row in ask(Cluster(), hostfile, network_test=False).rows}


def test_ranks_that_do_not_meet_and_slow_ones(hostfile: Path) -> None:
    cluster = Cluster()
    cluster.all_reduce = Finished(1, "", "the ranks did not finish within 60 s\n", 60.0)
    assert "the ranks did not finish within 60 s" in row_of(ask(cluster, hostfile), "all-reduce")[1]
    status, found = row_of(ask(Cluster(), hostfile, promised_bytes_per_s=50e9), "all-reduce")
    assert status == "fail" and "promises 50.00 GB/s" in found


def test_the_measured_ranks_are_numbered_over_all_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("node-0 slots=2\nnode-1 slots=4\n")
    cluster = Cluster(node_0=HostReport(num_gpus=2, address="10.0.0.1"), node_1=HostReport(num_gpus=4))
    ask(cluster, path)
    commands = cluster.lines(ALL_REDUCE)
    assert "--backend=nccl --master=10.0.0.1" in commands["node-0"]
    assert "--first-rank=0 --ranks=2 --world-size=6" in commands["node-0"]
    assert "--first-rank=2 --ranks=4 --world-size=6" in commands["node-1"]


def test_a_group_that_hangs_or_fails_is_reported_and_the_others_are_there() -> None:
    def fail() -> list[object]:
        raise OSError("Stale file handle")

    def hang() -> list[object]:
        time.sleep(HANG_S)
        return []

    findings = _run_groups({"good": lambda: [green("a", "b")], "stuck": hang, "bad": fail}, timeout_s=2)  # type: ignore[dict-item]
    assert findings[0] == green("a", "b")
    problems = [row.found for row in findings[1:]]  # type: ignore[union-attr]
    assert problems == ["bad: OSError: Stale file handle", "stuck: no answer within 2 s"]


def test_a_request_of_another_llmscale_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", PROBE, '{"port": "x"}'],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_variables_go_through_stdin_and_the_folder_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real shell: what the ranks get, quoted, and not on the command line."""
    monkeypatch.setenv("NCCL_DEBUG", "it's $HOME; `x`")
    monkeypatch.chdir(tmp_path)
    words: list[str] = []

    def spy(hosts: Sequence[str], argv: Sequence[str], *, timeout_s: float, stdin: str | None) -> dict[str, Finished]:
        words.extend(argv)
        return run_on_hosts(hosts, argv, timeout_s=timeout_s, stdin=stdin)

    (tmp_path / "show.py").write_text("import os; print(os.getcwd(), os.environ['NCCL_DEBUG'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = HostRunner(spy).module(["localhost"], "show", [], HANG_S)["localhost"]
    assert answer.stdout == f"{tmp_path} it's $HOME; `x`\n", answer.stderr
    assert not any("it's" in word for word in words)


def test_the_command_on_this_machine(tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real probe, in its own process, with a run."""
    run = ["--data", str(tiny_set), "--run", str(tmp_path / "r"), "--model", "tiny-1m", "--ds", "ds_configs/zero2.json"]
    flags = ["--no-network-test", "--timeout", str(HANG_S), "--json"]
    status = main(["doctor", *flags, "--", *run])
    output = capsys.readouterr().out
    assert status == 0, output
    rows = {row["name"]: row["found"] for row in json.loads(output)["rows"]}
    assert rows["ds_config"] == "ds_configs/zero2.json: every key is known and has an effect"
    assert {"versions", "imports", "gpus", "port", "data", "disk", "run config", "run folder"} <= set(rows)


def test_exit_code_and_table(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(node_1=HostReport((red("ds_config", "offload_param needs stage 3.", "Set stage to 3."),)))
    monkeypatch.setattr("llmscale.cluster.doctor.diagnose.HostRunner", lambda: HostRunner(cluster.run))
    assert main(["doctor", "--json", "--hostfile", str(hostfile)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "fail"
    assert answer["hosts"] == [{"name": "node-0", "slots": 1}, {"name": "node-1", "slots": 1}]
    assert main(["doctor", "--hostfile", str(hostfile)]) == 1
    table = capsys.readouterr().out
    assert table.splitlines()[-1].startswith("2 hosts, 2 ranks: ")
    assert "\033[" not in table, "no colour off a terminal"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hostfile", "no/such/file"], "no/such/file does not exist"),
        (["--interconnect", "ib-400"], "Did you mean 'ib-400g'?"),
        (["--port", "70000"], "argument --port: must be a whole number of at least 1 and at most 65,535, not '70000'"),
        (["--timeout", "0"], "argument --timeout: must be a number of at least 0.001"),
        (["--hostfle", "x"], "Did you mean '--hostfile'?"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [green("a", "fine"), yellow("bb", "so so", "Do this."), red("c", "word " * 30, "Do that.")]
    plain = table_lines(rows, width=60)
    assert plain[:3] == ["ok    a   fine", "warn  bb  so so", "          fix: Do this."]
    assert plain[3].startswith("FAIL  c   word word")
    assert max(map(len, plain)) <= 60
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert table_lines(rows, width=60)[0] == "\033[32mok\033[0m    a   fine"
