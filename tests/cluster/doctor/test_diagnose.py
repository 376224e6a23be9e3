"""The doctor as a whole, on hosts that answer as they are told to."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.cli.doctor import table_lines
from llmscale.cli.main import main
from llmscale.cluster.doctor.diagnose import Diagnosis, DoctorOptions, diagnose
from llmscale.cluster.doctor.facts import (
    FileFacts,
    FolderFacts,
    HostFacts,
    format_by_host,
    format_hosts,
    green,
    print_facts,
    red,
    split_error,
    worst,
    yellow,
)
from llmscale.cluster.extension_locks import ExtensionLock
from llmscale.cluster.remote import Finished, HostRunner, run_on_hosts
from llmscale.errors import ConfigError
from tests.cluster.doctor.host_facts import break_host, build_pair

HEALTHY_RESULT = {"backend": "gloo", "world_size": 2, "num_bytes": 2**26, "seconds": 0.06, "latency_s": 2e-4}


class Cluster:
    """Stands in for ssh: a pair of hosts with given facts."""

    def __init__(self, facts: dict[str, HostFacts]) -> None:
        self.facts = facts
        self.ssh: dict[str, Finished] = {}
        """Answers to the login of hosts that do not take it."""
        self.clock_ahead_s = dict.fromkeys(facts, 0.0)
        self.sees_nonce = True
        self.all_reduce: Finished = Finished(0, f"llmscale-all-reduce {json.dumps(HEALTHY_RESULT)}", "", 1.0)
        self.asked: list[tuple[tuple[str, ...], str]] = []

    def run(
        self, hosts: Sequence[str], argv: Sequence[str], *, timeout_s: float, stdin: str | None = None
    ) -> dict[str, Finished]:
        line = " ".join(argv)
        self.asked.append((tuple(hosts), line))
        return {host: self._answer(host, argv, line) for host in hosts}

    def _answer(self, host: str, argv: Sequence[str], line: str) -> Finished:
        if argv[0] == "ssh":
            name = argv[argv.index("--") - 1]
            clock = time.time() + self.clock_ahead_s[name]
            return self.ssh.get(name, Finished(0, f"{clock:.9f}\n", "", 0.1))
        if "llmscale.cluster.doctor.diagnose" in line:
            return Finished(0, print_facts(self.facts[host]), "", 0.5)
        if "llmscale.cluster.doctor.network" in line:
            return self.all_reduce
        if "exit 1" in line:
            return Finished(0 if self.sees_nonce else 1, "", "", 0.1)
        return Finished(0, "", "", 0.1)

    def runner(self) -> HostRunner:
        return HostRunner(self.run)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("node-0 slots=1\nnode-1 slots=1\n")
    return path


def ask(cluster: Cluster, hostfile: Path, **question: object) -> Diagnosis:
    return diagnose(DoctorOptions(hostfile=hostfile, **question), cluster.runner())  # type: ignore[arg-type]


def reds(diagnosis: Diagnosis) -> dict[str, str]:
    return {row.name: row.found for row in diagnosis.rows if row.status == "fail"}


def test_a_healthy_pair(hostfile: Path) -> None:
    cluster = Cluster(build_pair())
    diagnosis = ask(cluster, hostfile)
    assert [row for row in diagnosis.rows if row.status != "ok"] == []
    names = [row.name for row in diagnosis.rows]
    assert {"reach", "clock", "run folder", "all-reduce"} <= set(names)
    assert list(diagnosis.facts) == ["node-0", "node-1"]


def test_a_host_that_is_not_there_does_not_hide_the_others(hostfile: Path) -> None:
    cluster = Cluster(break_host(build_pair(), "node-0", "system", open_files=100))
    cluster.ssh["node-1"] = Finished(255, "", "ssh: connect to host node-1 port 22: Connection refused", 0.1)
    diagnosis = ask(cluster, hostfile)
    assert set(reds(diagnosis)) == {"reach", "open files"}
    assert list(diagnosis.facts) == ["node-0"]
    assert not any("doctor.network" in line for _, line in cluster.asked), "one host has nobody to exchange data with"


def test_no_host_is_there(hostfile: Path) -> None:
    cluster = Cluster(build_pair())
    cluster.ssh = dict.fromkeys(("node-0", "node-1"), Finished(124, "", "", 20.0))
    diagnosis = ask(cluster, hostfile)
    assert [row.name for row in diagnosis.rows] == ["reach", "reach"]
    assert worst(diagnosis.rows) == "fail"


def test_a_clock_that_is_wrong(hostfile: Path) -> None:
    cluster = Cluster(build_pair())
    cluster.clock_ahead_s["node-1"] = 90.0
    assert "node-1 is 90.0 s ahead" in reds(ask(cluster, hostfile))["clock"]


def test_rows_go_from_green_to_red(hostfile: Path) -> None:
    pair = break_host(build_pair(), "node-1", "code", sha256="0" * 64)
    pair = break_host(pair, "node-1", "network", interfaces=(replace(pair["node-1"].network.interfaces[1], mtu=9000),))  # type: ignore[union-attr]
    statuses = [row.status for row in ask(Cluster(pair), hostfile).rows]
    assert statuses == sorted(statuses, key=("ok", "warn", "fail").index)
    assert {"ok", "warn", "fail"} == set(statuses)


def test_the_file_written_to_find_out_what_is_shared_is_removed(hostfile: Path) -> None:
    cluster = Cluster(build_pair())
    cluster.sees_nonce = False
    (row,) = [row for row in ask(cluster, hostfile).rows if row.name == "run folder"]
    assert "is not there on node-1" in row.found
    (written,) = [line for hosts, line in cluster.asked if "touch" in line and hosts == ("node-0",)]
    (removed,) = [line for hosts, line in cluster.asked if "rm -f" in line and hosts == ("node-0",)]
    path = written.split()[-1]
    assert path.startswith("/shared/.llmscale-doctor-")
    assert removed.endswith(path)


def test_no_network_test_is_run_when_it_cannot_work(hostfile: Path) -> None:
    pair = break_host(build_pair(), "node-1", "imports", problem="ImportError: libtorch.so")
    cluster = Cluster(pair)
    diagnosis = ask(cluster, hostfile)
    (row,) = [row for row in diagnosis.rows if row.name == "all-reduce"]
    assert (row.status, row.fix) == ("warn", "First repair: imports.")
    assert not any("doctor.network" in line for _, line in cluster.asked)


def test_the_network_test_can_be_left_out(hostfile: Path) -> None:
    assert "all-reduce" not in {row.name for row in ask(Cluster(build_pair()), hostfile, network_test=False).rows}


def test_ranks_that_do_not_meet(hostfile: Path) -> None:
    cluster = Cluster(build_pair())
    cluster.all_reduce = Finished(1, "", "the ranks did not finish within 60 s\n", 60.0)
    assert "the ranks did not finish within 60 s" in reds(ask(cluster, hostfile))["all-reduce"]


def test_a_slow_network_is_judged_by_the_one_that_was_promised(hostfile: Path) -> None:
    diagnosis = ask(Cluster(build_pair()), hostfile, promised_bytes_per_s=50e9)
    assert "the links promise 50.00 GB/s" in reds(diagnosis)["all-reduce"]


def test_the_measured_ranks_are_numbered_over_all_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("node-0 slots=2\nnode-1 slots=4\n")
    pair = {**build_pair(4), "node-0": build_pair(2)["node-0"]}
    cluster = Cluster(pair)
    ask(cluster, path)
    commands = {hosts: line for hosts, line in cluster.asked if "llmscale.cluster.doctor.network" in line}
    assert "--backend nccl --master 10.0.0.1" in commands[("node-0",)]
    assert "--first-rank 0 --ranks 2 --world-size 6" in commands[("node-0",)]
    assert "--first-rank 2 --ranks 4 --world-size 6" in commands[("node-1",)]


def test_ops_are_built_where_they_are_asked_for(hostfile: Path, tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    ds.write_text(json.dumps({"zero_optimization": offload, "bf16": {"enabled": True}}))
    lock = ExtensionLock("/cache/async_io/lock", 900.0, False)
    cluster = Cluster(break_host(build_pair(), "node-1", "system", locks=(lock,), built_ops=()))
    diagnosis = ask(cluster, hostfile, ds=ds, build_ops=True)
    commands = {hosts: line for hosts, line in cluster.asked if "llmscale.cluster.doctor.system" in line}
    assert "pin_memory async_io --timeout-s" in commands[("node-0",)]
    assert "pin_memory async_io --remove-lock /cache/async_io/lock" in commands[("node-1",)]
    assert any(row.name == "build" and "removed /cache/async_io/lock on node-1" in row.found for row in diagnosis.rows)


def test_a_config_without_nvme_needs_no_ops(hostfile: Path) -> None:
    diagnosis = ask(Cluster(build_pair()), hostfile, ds=Path("ds_configs/zero3_offload.json"), build_ops=True)
    assert "needs no compiled" in next(row.found for row in diagnosis.rows if row.name == "build")


def test_building_without_a_config_is_refused(hostfile: Path) -> None:
    with pytest.raises(ConfigError, match="--build-ops needs --ds or --run-config"):
        ask(Cluster(build_pair()), hostfile, build_ops=True)


def test_the_run_is_resolved_for_all_slots(hostfile: Path) -> None:
    flags = ("--model", "gpt2-124m", "--global-batch-size", "1", "--steps", "10")
    assert (
        "fewer sequences than there are ranks" in reds(ask(Cluster(build_pair()), hostfile, train_flags=flags))["batch"]
    )


def test_a_disk_that_is_too_small_for_the_run(hostfile: Path) -> None:
    small = FolderFacts("/shared/run", "/shared", True, 2**30, 0, 0)
    pair = break_host(build_pair(), "node-0", "run", folder=small)
    flags = ("--model", "gpt2-1.5b", "--global-batch-size", "64", "--steps", "5000")
    assert "for 4 checkpoints of" in reds(ask(Cluster(pair), hostfile, train_flags=flags))["disk"]


def test_variables_go_through_stdin_and_the_folder_is_kept(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real shell: what the ranks get, quoted, and not on the command line."""
    monkeypatch.setenv("NCCL_DEBUG", "it's $HOME; `x`")
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def spy(hosts: Sequence[str], argv: Sequence[str], *, timeout_s: float, stdin: str | None) -> dict[str, Finished]:
        seen.extend(argv)
        return run_on_hosts(hosts, argv, timeout_s=timeout_s, stdin=stdin)

    code = "import os; print(os.getcwd(), os.environ['NCCL_DEBUG'])"
    (tmp_path / "show.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = HostRunner(spy).module(["localhost"], "show", [], 60)["localhost"]
    assert answer.stdout == f"{tmp_path} it's $HOME; `x`\n", answer.stderr
    assert not any("it's" in word for word in seen)


def test_the_command_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The real probe, in its own process."""
    status = main(["doctor", "--no-network-test", "--ds", "ds_configs/zero2.json", "--json"])
    output = capsys.readouterr().out
    assert status == 0, output
    answer = json.loads(output)
    assert "ds_configs/zero2.json: every key is known and has an effect" in [row["found"] for row in answer["rows"]]
    ((host, facts),) = answer["facts"].items()
    assert facts["late"] == {}
    assert facts["code"]["python"].startswith("3.")
    assert (facts["imports"]["problem"], facts["ds"]["problems"], facts["run"]) == (None, [], None)
    assert host in facts["network"]["routes"]


def test_json_and_exit_code(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, fix = (
        "ds.json: offload_param needs stage 3; at stage 2 DeepSpeed ignores it.",
        "Set stage to 3, or delete it.",
    )
    pair = {
        host: replace(facts, ds=FileFacts("ds.json", (f"{found} {fix}",), None)) for host, facts in build_pair().items()
    }
    monkeypatch.setattr("llmscale.cluster.doctor.diagnose.HostRunner", Cluster(pair).runner)
    assert main(["doctor", "--json", "--hostfile", str(hostfile), "--ds", "ds.json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "fail"
    assert answer["hosts"] == [{"name": "node-0", "slots": 1}, {"name": "node-1", "slots": 1}]
    (row,) = [row for row in answer["rows"] if row["status"] == "fail"]
    assert row == {"name": "ds_config", "status": "fail", "found": found, "fix": fix}
    assert answer["facts"]["node-1"]["network"]["interfaces"][1]["mtu"] == 1500
    assert main(["doctor", "--hostfile", str(hostfile), "--ds", "ds.json"]) == 1
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
        (["--build-ops"], "--build-ops needs --ds"),
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


def test_findings_of_many_hosts_in_few_words() -> None:
    assert format_by_host({"a": 1, "b": 1}) == "1"
    assert format_by_host({"a": 1, "b": 2, "c": 1}) == "1 on a, c; 2 on b"
    assert format_hosts(f"n{i}" for i in range(20)) == "n0, n1, n2, n3, n4, n5 and 14 more"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x is 3.5 of y. Set it to 4. Or drop it.", ("x is 3.5 of y.", "Set it to 4. Or drop it.")),
        ("x is wrong", ("x is wrong", "Correct the value that it names.")),
    ],
)
def test_an_error_is_a_finding_and_a_fix(text: str, parts: tuple[str, str]) -> None:
    assert split_error(text) == parts
