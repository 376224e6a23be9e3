"""The doctor as a whole, on hosts that answer as they are told to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from llmscale.cli.doctor import table_lines
from llmscale.cli.main import main
from llmscale.cluster.doctor import diagnose, on_ranks
from llmscale.cluster.doctor.diagnose import check_ds_config, check_run
from llmscale.cluster.doctor.report import REPORT, CheckRow, HostReport, ProbeRequest, green, red, yellow
from llmscale.cluster.hosts import Finished
from llmscale.cluster.launch.ranks import Gpu
from llmscale.config.run_arguments import parse_run_config
from tests.conftest import HANG_S

HEALTHY = HostReport(rows=(green("port", "free"),), address="10.0.0.1", folder="/shared/run")
RESULT = {"backend": "gloo", "world_size": 2, "num_bytes": 2**26, "seconds": 0.06, "sees": [True, True]}


class Cluster:
    """Stands in for ssh: a pair of hosts with given answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports = {"node-0": HEALTHY, "node-1": HEALTHY}
        self.failing: dict[str, Finished] = {}
        self.all_reduce = Finished(0, f"llmscale-answer {json.dumps(RESULT)}", "", 1.0)
        self.jobs: dict[str, dict[str, object]] = {}
        monkeypatch.setattr(diagnose, "ask_hosts", self.probe)
        monkeypatch.setattr(on_ranks, "ask_hosts", self.reduce)

    def probe(self, _module: str, requests: Mapping[str, object], _timeout_s: float) -> dict[str, Finished]:
        return {host: self.failing.get(host, self._report(host)) for host in requests}

    def _report(self, host: str) -> Finished:
        return Finished(0, f"Welcome!\nllmscale-answer {REPORT.dump_json(self.reports[host]).decode()}\n", "", 0.5)

    def reduce(self, _module: str, requests: dict[str, dict[str, object]], _timeout_s: float) -> dict[str, Finished]:
        self.jobs = requests
        return dict.fromkeys(requests, self.all_reduce)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def check(slots: int = 1, **options: object) -> dict[str, CheckRow]:
    request = ProbeRequest(hosts={"node-0": slots, "node-1": slots}, port=29500)
    return {row.name: row for row in diagnose.diagnose(request, **options)}  # type: ignore[arg-type]


def test_a_healthy_pair(cluster: Cluster) -> None:
    rows = check()
    assert {name: row.status for name, row in rows.items()} == dict.fromkeys(
        ("reach", "port", "all-reduce", "run folder"), "ok"
    )
    assert "all-reduce" not in check(network_test=False)


@pytest.mark.parametrize(
    ("answer", "text", "fix"),
    [
        (Finished(255, "", "root@node-1: Permission denied (publickey).", 1.0), "Permission denied", "copy your key"),
        (Finished(124, "", "asking the GPU driver\n", 90.0), "90 s, after `asking the GPU driver`", "stuck disk"),
        (Finished(1, "", "/env/bin/python: No module named llmscale", 1.0), "No module named", "same path"),
        (Finished(0, 'llmscale-answer {"rows": 3}', "", 1.0), "its llmscale is another one", "same path"),
    ],
)
def test_a_host_without_an_answer_does_not_hide_the_others(
    cluster: Cluster, answer: Finished, text: str, fix: str
) -> None:
    cluster.reports["node-0"] = HostReport(rows=(red("/dev/shm", "1 MiB free", "Make room."),))
    cluster.failing["node-1"] = answer
    rows = {name: row for name, row in check().items() if row.status == "fail"}
    assert set(rows) == {"reach", "/dev/shm"}
    assert rows["reach"].found.startswith("node-1: ") and text in rows["reach"].found
    assert fix in rows["reach"].fix
    assert not cluster.jobs, "one host has nobody to exchange data with"


def test_rows_go_from_green_to_red(cluster: Cluster) -> None:
    cluster.reports["node-0"] = HostReport(rows=(red("a", "x", "y"), green("b", "x"), yellow("c", "x", "y")))
    statuses = [row.status for row in check().values()]
    assert statuses == sorted(statuses, key=("ok", "warn", "fail").index)
    assert {"ok", "warn", "fail"} == set(statuses)


def test_no_network_test_is_run_when_it_cannot_work(cluster: Cluster) -> None:
    cluster.reports["node-1"] = HostReport(rows=(red("imports", "ImportError: libtorch.so", "Repair it."),))
    row = check()["all-reduce"]
    assert (row.status, row.fix) == ("warn", "First repair: imports.")
    assert not cluster.jobs


def test_ranks_that_do_not_meet_slow_ones_and_a_folder_of_each_host(cluster: Cluster) -> None:
    row = check(promised_bytes_per_s=50e9)["all-reduce"]
    assert row.status == "fail" and "promises 50.00 GB/s" in row.found
    cluster.all_reduce = Finished(0, f"llmscale-answer {json.dumps({**RESULT, 'sees': [True, False]})}", "", 1.0)
    row = check()["run folder"]
    assert row.status == "warn" and "a file of node-0 is not there on node-1" in row.found
    cluster.all_reduce = Finished(1, "", "Timed out waiting for clients\n", 60.0)
    assert "Timed out waiting for clients" in check()["all-reduce"].found


def test_the_measured_ranks_are_numbered_over_all_hosts(cluster: Cluster) -> None:
    cluster.reports = {"node-0": HostReport(num_gpus=2, address="10.0.0.1"), "node-1": HostReport(num_gpus=2)}
    cluster.all_reduce = Finished(1, "", "", 1.0)
    check(slots=2)
    assert [job["ranks"] for job in cluster.jobs.values()] == [[0, 1], [2, 3]]
    job = cluster.jobs["node-1"]
    assert (job["backend"], job["master"], job["world_size"]) == ("nccl", "10.0.0.1", 4)


def test_the_command_on_this_machine(tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real probe, in its own process, with a run."""
    run = ["--data", str(tiny_set), "--run", str(tmp_path / "r"), "--model", "tiny-1m", "--ds", "ds_configs/zero2.json"]
    flags = ["--no-network-test", "--timeout", str(HANG_S), "--json"]
    status = main(["doctor", *flags, "--", *run])
    output = capsys.readouterr().out
    assert status == 0, output
    rows = {row["name"]: row["found"] for row in json.loads(output)["rows"]}
    assert "every key is known and has an effect" in rows["ds_config"]
    assert {"versions", "imports", "gpus", "port", "data", "disk", "run config", "run folder"} <= set(rows)


def test_exit_code_and_table(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").write_text("node-0 slots=1\nnode-1 slots=1\n")
    cluster.reports["node-1"] = HostReport(rows=(red("ds_config", "offload_param needs stage 3.", "Set stage to 3."),))
    assert main(["doctor", "--json", "--hostfile", str(tmp_path / "hostfile")]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "fail"
    assert answer["hosts"] == [{"name": "node-0", "slots": 1}, {"name": "node-1", "slots": 1}]
    assert main(["doctor", "--hostfile", str(tmp_path / "hostfile")]) == 1
    table = capsys.readouterr().out
    assert table.splitlines()[-1].startswith("2 hosts, 2 ranks: ")
    assert "\033[" not in table, "no colour off a terminal"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hostfile", "no/such/file"], "no/such/file does not exist"),
        (["--interconnect", "ib-400"], "Did you mean 'ib-400g'?"),
        (["--port", "70000"], "argument --port: must be a whole number of at least 1 and at most 65,535, not '70000'"),
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


# ---------------------------------------------------------------- a run on its host

GIB = 2**30


def test_all_problems_of_a_ds_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimisation": {"stage": 2}, "gradient_clipping": "much"}))
    wrong = [row for row in check_ds_config(path) if row.status == "fail"]
    assert len(wrong) == 2
    assert any("'zero_optimization'" in f"{row.found} {row.fix}" for row in wrong)
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "sub_group_size": 100}}))
    (_, idle) = check_ds_config(path)
    assert idle.status == "warn" and "sub_group_size has no effect at stage 2" in idle.found
    (missing,) = check_ds_config(tmp_path / "no.json")
    assert "does not exist" in missing.found


def flags_of(data: Path, run: Path, *more: str) -> list[str]:
    return ["--ds", "ds_configs/zero2.json", "--data", str(data), "--run", str(run), "--model", "tiny-1m", *more]


def check_flags(flags: list[str], gpus: Sequence[Gpu] = ()) -> list[CheckRow]:
    return [*check_run(parse_run_config(flags), ProbeRequest(hosts={"here": 2}, host="here", port=0), gpus)]


def test_a_run_as_train_would_find_it(tiny_set: Path, tmp_path: Path) -> None:
    rows = check_flags(flags_of(tiny_set, tmp_path / "r", "--global-batch-size", "8"))
    assert {row.status for row in rows} == {"ok"}
    assert {"run config", "run folder", "disk"} <= {row.name for row in rows}
    assert not (tmp_path / "r").exists()


def test_a_run_that_train_would_refuse(tiny_set: Path, tmp_path: Path) -> None:
    (row,) = [
        row
        for row in check_flags(flags_of(tiny_set, tmp_path / "r", "--global-batch-size", "1"))
        if row.status == "fail"
    ]
    assert row.name == "run config"
    assert "fewer sequences than there are ranks" in row.found


def test_a_dataset_with_a_missing_shard(tiny_set: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "set"
    shutil.copytree(tiny_set, damaged)
    shard = next(damaged.glob("train/*.mds"))
    shard.unlink()
    faults = {row.name: row for row in check_flags(flags_of(damaged, tmp_path / "r")) if row.status == "fail"}
    assert shard.name in faults["data"].found


def test_a_missing_dataset_is_one_row(tmp_path: Path) -> None:
    (row,) = [row for row in check_flags(flags_of(tmp_path / "none", tmp_path / "r")) if row.status == "fail"]
    assert row.name == "data"


@pytest.mark.parametrize(("memory_gib", "status"), [(80, "ok"), (1, "fail")])
def test_the_estimate_and_the_smallest_gpu(memory_gib: int, status: str, tiny_set: Path, tmp_path: Path) -> None:
    gpus = [Gpu(i, "NVIDIA H100 80GB HBM3", size * GIB, 0, "570") for i, size in enumerate((80, memory_gib))]
    (row,) = [row for row in check_flags(flags_of(tiny_set, tmp_path / "r"), gpus) if row.name == "memory"]
    assert row.status == status
    assert f"of {memory_gib}.00 GiB on NVIDIA H100 80GB HBM3" in row.found
    if status == "fail":
        assert row.fix
