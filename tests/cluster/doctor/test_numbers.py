"""`llmscale doctor --numerics` from its flags to its report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.cluster.doctor import numbers
from llmscale.errors import ConfigError, MachineError
from llmscale.numerics.links import LINKS, Finding, first_wrong
from llmscale.numerics.report import ONE_RANK, Pass, Report, Try, as_row, table_lines, worst_rows

FLAGS = ("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--ds", "zero2", "--precision", "bf16")


def test_doctor_finds_an_engine_right(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Through real processes, on the hosts of a file."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    assert main(["doctor", "--numerics", "--json", "--hostfile", str(hostfile), "--", *FLAGS]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [one["precision"] for one in report["passes"]] == ["fp32", "bf16"]
    for one in report["passes"]:
        assert {row["link"] for row in one["rows"]} == set(LINKS)
        assert all(row["verdict"] == "right" for row in one["rows"]) and one["first_wrong"] is None
    assert report["setting"] is None and report["tries"] == []


def test_a_run_that_cannot_be_is_refused_as_train_refuses_it(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--n-head", "3", "--n-embd", "32", "--ds", "zero2")
    assert main(["doctor", "--numerics", "--ranks", "1", "--", *flags]) == 2
    assert "3" in capfd.readouterr().err


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


@dataclass
class Reply:
    """Answer of a host."""

    stdout: str
    returncode: int = 0

    def describe(self) -> str:
        return self.stdout


def answer_with(monkeypatch: pytest.MonkeyPatch, reply: Callable[[str, dict], Reply]) -> None:
    """Let `reply` answer in place of every host."""

    def ask(module: str, requests: Mapping[str, dict], timeout_s: float) -> dict[str, Reply]:
        return {host: reply(host, request) for host, request in requests.items()}

    monkeypatch.setattr(numbers, "ask_hosts", ask)


def test_one_rank_is_tried_after_the_settings_of_all_and_before_another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, asked = finding("norm", 5.0), []
    broken = {"precision": "bf16", "description": "", "rows": [], "seconds": 0.0, "first_wrong": vars(as_row(wrong))}
    right = {**broken, "first_wrong": None}

    def reply(host: str, request: dict) -> Reply:
        asked.append((host, request["ranks"], request["tries"]))
        one = right if request["world_size"] == 1 else broken
        return Reply("llmscale-numerics " + json.dumps({"passes": [one], "tries": []}))

    answer_with(monkeypatch, reply)
    report = numbers.prove({"a": 2, "b": 3}, (), 60)
    assert asked == [("a", [0, 1], None), ("b", [2, 3, 4], None), ("a", [0], ())]
    assert report.setting == ONE_RANK


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (1, MachineError)])
def test_ranks_that_fail_are_no_report(monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]) -> None:
    answer_with(monkeypatch, lambda host, request: Reply("error: no such thing", code))
    with pytest.raises(error, match="no such thing"):
        numbers.prove({"a": 1}, (), 60)
