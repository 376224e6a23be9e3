from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmscale.errors import ConfigError
from llmscale.report import data
from llmscale.report.charts import training_hours
from llmscale.report.data import LEAST_POINTS, MOST_MARKS, build_report, find_marks, how_it_ended
from llmscale.report.history import RunHistory, load_history
from llmscale.report.html_page import build_page
from llmscale.report.run_facts import load_facts
from llmscale.report.run_list import find_runs
from tests.report.runs import HOSTILE, full_run, hostile_run, start, train, write_run


def report_of(*folders: Path) -> Any:
    report = build_report(folders)
    json.dumps(report, allow_nan=False)
    return report


def curves_of(report: Any) -> dict[str, list[dict]]:
    """Curves by the title of their chart."""
    return {chart["title"]: chart["curves"] for chart in report["charts"]}


def test_every_kind_of_record_is_in_it(tmp_path: Path) -> None:
    report = report_of(full_run(tmp_path))
    (run,), curves = report["runs"], curves_of(report)
    assert run["axis"]["steps"] == list(range(1, 41))
    training, validation = curves["Training and validation loss"]
    assert training["values"][0] == 8 and "steps" not in training
    assert (validation["steps"], validation["values"]) == ([40], [3.5])
    assert validation["bytes_per_token"] == pytest.approx(3.5 / 1.3 / math.log(2))
    (evaluation,) = curves["hellaswag"]
    assert (evaluation["steps"], evaluation["values"]) == ([40], [0.3])
    assert run["samples"] == [{"step": 40, "prompt": "The ", "text": "The end"}]
    assert len(curves["Memory of one rank"]) == 1, "the estimate is a GPU's, and this run's device a CPU"
    assert run["summary"]["starts"] == 2
    assert run["summary"]["tokens"] == 40 * 1024
    assert curves["Waiting for data"][0]["values"] == pytest.approx([20] * 40)
    # What no record says has no chart.
    assert not {"Auxiliary z-loss", "Loss scale", "Model FLOPs utilisation"} & curves.keys()


def test_a_published_result_is_a_line_in_the_charts_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(load_facts(full_run(tmp_path), RunHistory()), model="gpt2-124m", source="hf:a/fineweb-edu:b")
    monkeypatch.setattr(data, "load_facts", lambda *_: facts)
    *_, line = curves_of(report_of(tmp_path))["Training and validation loss"]
    assert (line["steps"], line["values"]) == ([1, 40], [3.2924, 3.2924])
    facts = replace(facts, source="hf:another/text")
    labels = [curve["label"] for curve in curves_of(report_of(tmp_path))["Training and validation loss"]]
    assert labels == ["training", "validation"]


def test_each_start_on_gpus_has_its_estimate(tmp_path: Path) -> None:
    starts = [start(device="cuda"), train(1), train(2), start(2, device="cuda", estimated_bytes=2**29), train(3)]
    _, estimated = curves_of(report_of(write_run(tmp_path, starts)))["Memory of one rank"]
    assert (estimated["steps"], estimated["values"]) == ([0, 2, 3], [0.25, 0.5, 0.5])


def test_parts_of_a_run_have_charts_of_their_own_in_a_comparison(tmp_path: Path) -> None:
    records = [start(), *(train(step, loss_by_set={"web": 3.0, "code": 2.0}) for step in (1, 2))]
    runs = [write_run(tmp_path / name, records) for name in ("a", "b")]
    units = [chart["unit"] for chart in report_of(*runs)["charts"] if chart["title"] == "Loss by set"]
    assert units == ["nats per token, a", "nats per token, b"]
    assert [curve["label"] for curve in curves_of(report_of(runs[0]))["Loss by set"]] == ["web", "code"]


def test_hours_are_those_of_steps_and_of_this_history(tmp_path: Path) -> None:
    """Half a second a step; what a restart went back from is not counted."""
    records = [start(), *(train(step) for step in range(1, 9)), start(4, 2, [(1, 4)]), train(5), train(6)]
    history = load_history(write_run(tmp_path, records))
    assert [hours * 3600 for hours in training_hours(history)] == pytest.approx([0.5 * step for step in range(1, 7)])
    assert report_of(tmp_path)["runs"][0]["summary"]["abandoned_records"] == 4


def test_hours_of_a_run_from_anothers_checkpoint_are_its_own(tmp_path: Path) -> None:
    history = load_history(write_run(tmp_path, [start(100), train(101), train(102)]))
    assert [hours * 3600 for hours in training_hours(history)] == pytest.approx([0.5, 1.0])


def test_a_long_run_keeps_its_spikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_POINTS", LEAST_POINTS)
    num_steps = 3 * LEAST_POINTS
    records = (train(step, 99.0 if step == 1_234 else 2.0) for step in range(1, num_steps + 1))
    report = report_of(write_run(tmp_path, records))
    run, (curve,) = report["runs"][0], curves_of(report)["Training loss"]
    assert len(curve["values"]) == len(curve["steps"]) <= LEAST_POINTS + 3
    assert curve["values"][curve["steps"].index(1_234)] == 99
    assert run["axis"]["tokens"][-1] == num_steps * 1024


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path, [train(1), train(2, math.nan), train(3)]))
    assert curves_of(report)["Training loss"][0]["values"][1] is None
    assert report["runs"][0]["summary"]["loss"] is not None


def test_runs_and_their_differences(tmp_path: Path) -> None:
    report = report_of(full_run(tmp_path / "a", lr=1e-3), full_run(tmp_path / "b", lr=2e-3), full_run(tmp_path / "c/a"))
    assert [run["name"] for run in report["runs"]] == ["a", "b", "c/a"]
    (difference,) = report["differences"]
    assert difference == {"section": "Configuration", "key": "lr", "values": ["0.001", "0.002", None]}


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    one, same = full_run(tmp_path / "one"), full_run(tmp_path / "same")
    other = write_run(tmp_path / "other", [start(tokenizer="llama", bytes_per_token=3.0), train(1)])
    unknown = write_run(tmp_path / "unknown", [start(tokenizer=None, bytes_per_token=None), train(1)], data="/gone")
    assert report_of(one, same)["unit"] == "nats"
    assert report_of(one, other)["unit"] == "bits"
    report = report_of(one, unknown)
    assert report["unit"] == "bits"
    assert any(note.startswith("unknown: ") and "(gone)" in note for note in report["notes"])
    assert report_of(unknown, unknown)["unit"] == "nats"


def test_a_hostile_run_is_a_report_that_says_so(tmp_path: Path) -> None:
    report = report_of(hostile_run(tmp_path))
    assert any("4 lines" in note for note in report["notes"])
    assert any("half-written" in note for note in report["notes"])
    run = report["runs"][0]
    assert run["axis"]["steps"] == [1, 2, 3, 4, 5, 6, 7]
    assert run["num_parameters"] is None and run["law"] is None
    for text in _texts(report):
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in [key, *_texts(inner)]]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else [str(value)]


def test_one_run_without_metrics_refuses_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        build_report([full_run(tmp_path / "a"), tmp_path / "nowhere"])


def test_no_secret_and_no_folder_of_the_machine_is_in_a_report(tmp_path: Path) -> None:
    notify = "curl -H 'Authorization: a-token' https://chat/hook"
    run = full_run(tmp_path / "runs" / "mine", notify=notify, data=str(tmp_path / "set"), text="s3://k:a-token@b/texts")
    words = ["--notify", notify, "--data", str(tmp_path / "set"), "--steps", "9"]
    spike = {"kind": "event", "event": "loss_spike", "step": 40, "loss": 9, "checkpoint": str(run / "checkpoints/s")}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(spike) + "\n")
    (run / "starts.jsonl").write_text(json.dumps({"host": "vm", "arguments": words}) + "\n")
    (run / "ds_config.json").write_text(json.dumps({"zero_optimization": {"nvme_path": str(tmp_path / "nvme")}}))
    (run / "failure.json").write_text(json.dumps({"error": f"cannot read {tmp_path}/set", "step": 40, "rank": 0}))
    report = build_report([run], find_runs(tmp_path))
    text = json.dumps(report)
    for secret in ("a-token", "curl", str(tmp_path)):
        assert secret not in text and secret not in build_page(report, "mine")
    (row,) = report["listed"]
    assert (row["run"], row["command"]) == ("mine", "train.py --data set --steps 9")
    assert report["runs"][0]["tables"]["DeepSpeed"] == {"zero_optimization.nvme_path": "nvme"}


def test_a_restart_says_what_changed(tmp_path: Path) -> None:
    marks = find_marks(load_history(full_run(tmp_path)))
    # The slow rank was told of without a step, after the last one.
    expected = [("start", 0), ("end", 20), ("start", 20), ("spike", 21), ("slow", 40), ("end", 40)]
    assert [(mark.kind, mark.step) for mark in marks] == expected
    restart = next(mark for mark in marks if mark.kind == "start" and mark.step == 20)
    assert "ranks 2 → 1" in restart.text and "ZeRO stage 1 → 3" in restart.text
    assert "→" not in restart.text.partition("precision")[2]
    assert restart.short == "1 rank, stage 3"


def test_steps_in_a_row_without_a_loss_are_one_mark(tmp_path: Path) -> None:
    losses = {3: math.nan, 4: math.inf, 7: math.nan}
    run = write_run(tmp_path, [start(), *(train(step, losses.get(step, 2.0)) for step in range(1, 8))])
    marks = [mark for mark in find_marks(load_history(run)) if mark.kind == "nonfinite"]
    assert [mark.step for mark in marks] == [3, 7]
    assert "3 to 4" in marks[0].text


def test_there_are_only_so_many(tmp_path: Path) -> None:
    spikes = [{"kind": "event", "event": "loss_spike", "step": 1, "loss": 1.0}] * (2 * MOST_MARKS)
    assert len(find_marks(load_history(write_run(tmp_path, [train(1), *spikes])))) == MOST_MARKS


def test_the_end(tmp_path: Path) -> None:
    assert how_it_ended(load_history(full_run(tmp_path))) == "finished"
    assert "no end" in how_it_ended(load_history(write_run(tmp_path, [start(), train(1)])))
    ends = {"kind": "event", "event": "stopped", "step": 1, "reason": "stopped by SIGTERM"}
    assert "no end" in how_it_ended(load_history(write_run(tmp_path, [start(), train(1), ends, start(1), train(2)])))


def test_texts_have_no_control_characters(tmp_path: Path) -> None:
    spike = {"kind": "event", "event": "loss_spike", "step": 1, "samples": HOSTILE, "checkpoint": ["\x1b[2J"]}
    for mark in find_marks(load_history(write_run(tmp_path, [start(device=HOSTILE), train(1), spike]))):
        assert mark.text.isprintable()
