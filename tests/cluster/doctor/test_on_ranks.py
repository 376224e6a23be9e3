"""Checks on real ranks: the timed all-reduce, the judgement of what it measured, and `doctor --numerics`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.cluster.doctor import on_ranks
from llmscale.cluster.doctor.on_ranks import AllReduceResult, check_all_reduce
from llmscale.cluster.hosts import Finished, ask_hosts
from llmscale.errors import ConfigError, MachineError
from llmscale.numerics.links import LINKS, Finding, first_wrong
from llmscale.numerics.report import ONE_RANK, Pass, Report, Try, as_row, table_lines, worst_rows
from tests.conftest import HANG_S, free_port

FLAGS = ("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--ds", "zero2", "--precision", "bf16")


def test_doctor_finds_an_engine_right(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Through a real process, on the host of a file."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\n")
    assert main(["doctor", "--numerics", "--json", "--hostfile", str(hostfile), "--", *FLAGS]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [one["precision"] for one in report["passes"]] == ["fp32", "bf16"]
    for one in report["passes"]:
        assert {row["link"] for row in one["rows"]} == set(LINKS)
        assert all(row["verdict"] == "right" for row in one["rows"]) and one["first_wrong"] is None
    assert report["setting"] is None and report["tries"] == []


def test_the_timeout_ends_the_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--numerics", "--ranks", "1", "--timeout", "1", "--", *FLAGS]) == 1
    error = capfd.readouterr().err
    assert "within 1 s" in error and error.count("\n") == 1


def finding(link: str, share: float, name: str = "all", step: int = 0, rank: int | None = None) -> Finding:
    return Finding(step, link, name, share * 0.5, 0.5, rank=rank)  # type: ignore[arg-type]


def test_the_first_wrong_link_of_the_first_wrong_step_counts() -> None:
    findings = [
        finding("update", 9.0, step=0, rank=1),
        finding("reduce", 2.0, "ln_f.weight"),
        finding("weights", math.inf, step=1),
    ]
    first = first_wrong(findings)
    assert first is not None and (first.link, first.name, first.rank) == ("reduce", "ln_f.weight", 1)
    assert first_wrong([finding("norm", 0.9)]) is None
    assert first_wrong([finding("norm", math.nan)]) is not None


def test_the_table_has_the_worst_of_each_layer_kind_and_the_verdict() -> None:
    findings = [
        finding("gradient", 0.1, "blocks.0.attn.qkv.weight"),
        finding("gradient", 3.0, "blocks.1.ln_1.bias", rank=2),
        finding("gradient", 0.3, "blocks.1.attn.proj.weight"),
        finding("loss", 0.5),
    ]
    rows = worst_rows(findings, LINKS)
    assert [(row.link, row.what, row.share) for row in rows] == [
        ("loss", "", 0.5),
        ("gradient", "attention", 0.3),
        ("gradient", "norms", 3.0),
    ]
    first = as_row(findings[1])
    report = Report((Pass("bf16", "a block", rows, 2.0, first),), (Try("offload off", "wrong"),))
    text = "\n".join(table_lines(report))
    assert "WRONG  blocks.1.ln_1.bias, step 1" in text
    assert "3 times what is allowed. Only rank 2 is wrong." in text
    assert "Still wrong with: offload off." in text


def answer_with(monkeypatch: pytest.MonkeyPatch, reply: Callable[[str, dict], Finished]) -> None:
    """Let `reply` answer in place of every host."""

    def ask(module: str, requests: Mapping[str, dict], timeout_s: float) -> dict[str, Finished]:
        return {host: reply(host, request) for host, request in requests.items()}

    monkeypatch.setattr(on_ranks, "ask_hosts", ask)


def test_one_rank_is_tried_after_the_settings_of_all_and_before_another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, asked = finding("norm", 5.0), []
    broken = {"precision": "bf16", "description": "", "rows": [], "seconds": 0.0, "first_wrong": vars(as_row(wrong))}
    right = {**broken, "first_wrong": None}

    def reply(host: str, request: dict) -> Finished:
        asked.append((host, request["ranks"], request["tries"]))
        one = right if request["world_size"] == 1 else broken
        return Finished(0, "llmscale-answer " + json.dumps({"passes": [one], "tries": []}), "", 1.0)

    answer_with(monkeypatch, reply)
    report = on_ranks.prove({"a": 2, "b": 3}, (), 60)
    assert asked == [("a", [0, 1], None), ("b", [2, 3, 4], None), ("a", [0], ())]
    assert report.setting == ONE_RANK


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (1, MachineError)])
def test_ranks_that_fail_are_no_report(monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]) -> None:
    answer_with(monkeypatch, lambda host, request: Finished(code, "", "error: no such thing", 1.0))
    with pytest.raises(error, match="no such thing"):
        on_ranks.prove({"a": 1}, (), 60)


def run_ranks(ranks: int, world_size: int, timeout_s: int, folder: Path) -> Finished:
    request = {
        "task": "all-reduce",
        "backend": "gloo",
        "master": "127.0.0.1",
        "port": free_port(),
        "world_size": world_size,
        "ranks": [*range(ranks)],
        "wait_s": timeout_s,
        "timeout_s": timeout_s + 60,
        "folder": str(folder),
        "file": ".mark",
    }
    return ask_hosts("llmscale.cluster.doctor.on_ranks", {"localhost": request}, HANG_S)["localhost"]


def test_two_ranks_measure_and_see_one_folder(tmp_path: Path) -> None:
    done = run_ranks(ranks=2, world_size=2, timeout_s=200, folder=tmp_path / "not" / "there")
    assert done.returncode == 0, done.stderr
    result = AllReduceResult(**json.loads(done.answer))
    assert (result.backend, result.world_size, result.sees) == ("gloo", 2, [True, True])
    assert result.num_bytes >= 2**20
    assert result.bus_bytes_per_s == pytest.approx(result.num_bytes / result.seconds)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run_ranks(ranks=1, world_size=2, timeout_s=3, folder=tmp_path)
    assert done.returncode == 1
    assert time.monotonic() - began < HANG_S, "the rendezvous waits for half an hour"
    assert "Timed out" in done.describe()


@pytest.mark.parametrize(("frac", "status"), [(0.25, "ok"), (0.15, "warn"), (0.05, "fail")])
def test_the_measured_bandwidth_against_the_promised_one(frac: float, status: str) -> None:
    result = AllReduceResult("gloo", 2, 10**9, 1e9 / (frac * 1.25e9), [True, True])
    row = check_all_reduce(result, 1.25e9)
    assert row.status == status
    assert "promises 1.25 GB/s" in row.found
    assert check_all_reduce(result, None).status == "ok"
