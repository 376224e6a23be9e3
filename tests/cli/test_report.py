"""`llmscale report`: what a user reads after a run."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import CheckpointManifest, save_manifest
from llmscale.cli import report
from llmscale.cli.main import main
from llmscale.cli.report import draw_chart
from llmscale.training.run_folder import record_failure
from tests import warm_start
from tests.conftest import HANG_S, REPOSITORY


@pytest.fixture
def run(tmp_path: Path, tiny_set: Path) -> Path:
    """A run folder on the tiny set, with two logged steps and a validation."""
    (tmp_path / "config.json").write_text(json.dumps({"config": {"data": str(tiny_set)}}))
    records: list[dict[str, object]] = [
        {"kind": "train", "step": step, "loss": loss, "tokens_seen": step * 1000, "tokens_per_second": 2000.0}
        for step, loss in ((1, 5.5), (20, 1.25))
    ]
    records.append({"kind": "validation", "step": 20, "loss": 9.5, "num_samples": 4})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = tmp_path / "checkpoints" / "step-00000020"
    folder.mkdir(parents=True)
    save_manifest(folder, CheckpointManifest(20, 20_000, 1, 2, "fp32", "now", ()))
    return tmp_path


def test_compares_the_losses_with_the_unigram_entropy(
    run: Path, tiny_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr().out
    splits = json.loads((tiny_set / "manifest.json").read_text())["splits"]
    entropy, val_entropy = splits["train"]["unigram_entropy_nats"], splits["val"]["unigram_entropy_nats"]
    assert f"5.500 -> 1.250  ({entropy - 1.25:.3f} below the unigram entropy, {entropy:.3f})" in output
    assert f"9.500  ({9.5 - val_entropy:.3f} ABOVE the unigram entropy, {val_entropy:.3f})" in output
    assert "20 steps, 20,000 tokens, 2,000 tokens/s" in output
    assert str(run / "checkpoints" / "step-00000020") in output
    assert "-----" in output


def test_a_run_whose_set_is_gone_still_has_a_curve(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.json").unlink()
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr().out
    assert "training loss    5.500 -> 1.250\n" in output
    assert "entropy" not in output
    assert "text             no samples yet: " in output
    with (run / "metrics.jsonl").open("a") as file:
        for step in (10, 20):
            file.write(
                json.dumps({"kind": "sample", "step": step, "prompt": "The ", "text": f"The end\n{step}"}) + "\n"
            )
    assert main(["report", str(run)]) == 0
    assert "\ntext at step 20\nThe end\n20\n" in capsys.readouterr().out


def test_what_the_metrics_do_not_say_is_said_in_the_terminal_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"kind": "train", "step": 3, "loss": 2.0, "tokens_seen": 3000, "tokens_per_second": None}
    lines = [json.dumps(record), json.dumps(record | {"tokens_seen": "20"}), '{"kind": "tra']
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines))
    assert main(["report", str(run)]) == 0
    notes = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("metrics")]
    assert [note.split()[:2] for note in notes] == [["1", "record"], ["the", "last"], ["1", "record"]]


def test_writes_what_is_asked_for_and_nothing_else(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    out.mkdir()
    flags = [word for kind in ("html", "png", "svg", "json") for word in (f"--{kind}", str(out / f"report.{kind}"))]
    assert main(["report", str(run), *flags]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json", "report.png", "report.svg"]
    report = json.loads((out / "report.json").read_text())
    assert report["charts"][0]["curves"][0]["values"] == [5.5, 1.25]
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out.count(" KB") == 4


@pytest.fixture
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three runs: two with a loss, and one that failed before its first step."""
    folder = tmp_path_factory.mktemp("folder")
    for name, loss in (("worse", 2.5), ("better", 0.5)):
        shutil.copytree(run, folder / name, ignore=shutil.ignore_patterns("checkpoints"))
        record = {"kind": "train", "step": 30, "loss": loss, "tokens_seen": 30000, "tokens_per_second": 2000.0}
        with (folder / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    (folder / "early").mkdir()
    (folder / "early" / "starts.jsonl").write_text("{}\n")
    record_failure(folder / "early", RuntimeError("<b>no\x1b[2J memory</b>"), step=0, rank=1)
    return folder


def test_a_folder_of_runs_is_a_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows[:3]} == {"better", "worse", "early"}
    assert "early: failed: RuntimeError: <b>no\\x1b[2J memory</b>" in rows
    assert main(["report", str(folder), str(folder / "better"), "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert sorted(entry["name"] for entry in report["runs"]) == ["better", "worse"]
    listed = {Path(entry["run"]).name: entry for entry in report["listed"]}
    assert listed["early"]["why"].startswith("RuntimeError: <b>no\\x1b[2J memory</b>")
    assert (listed["better"]["loss"], listed["better"]["validation_loss"], listed["early"]["loss"]) == (0.5, 9.5, None)
    assert main(["report", str(folder), "--html", str(folder / "better" / "metrics.jsonl")]) == 2
    assert "is a file of the run itself" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["Ctrl-C", "closed pipe"])
def test_watch_reports_again_when_records_change(run: Path, end: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("out") / "report.json"

    def train(step: int) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            record = {"kind": "train", "step": step, "loss": 0.75, "tokens_seen": 30000, "tokens_per_second": 2000.0}
            file.write(json.dumps(record) + "\n")

    process = warm_start.Process(
        [sys.executable, "-m", "llmscale.cli.main", "report", str(run), "--watch", "--json", str(out)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith(f"{out}: ")
        train(30)
        assert process.stdout.readline().startswith(f"{out}: ")
        assert json.loads(out.read_text())["charts"][0]["curves"][0]["values"] == [5.5, 1.25, 0.75]
        if end == "Ctrl-C":
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=HANG_S)[0] == ""
        else:
            process.stdout.close()
            train(40)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()


def test_a_page_reloads_while_its_run_lives_and_has_the_unigram_line(
    run: Path, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, pages = tmp_path_factory.mktemp("out") / "report.html", list[str]()
    monkeypatch.setattr(report, "is_claimed", lambda path: not pages)

    def look(_seconds: float) -> None:
        pages.append(out.read_text())
        if len(pages) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", look)
    assert main(["report", str(run), "--watch", "--html", str(out)]) == 0
    assert ['http-equiv="refresh"' in page for page in pages] == [True, False], "its end is a change"
    entropy = json.loads((tiny_set / "manifest.json").read_text())["splits"]["train"]["unigram_entropy_nats"]
    assert f'"label":"unigram entropy","values":[{entropy}' in pages[0]


def test_watch_survives_a_file_that_vanishes_and_a_full_disk(
    run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path_factory.mktemp("out") / "report.json"
    errors = [FileNotFoundError(2, "No such file or directory", str(out)), OSError(28, "No space left on device"), None]
    wrote = report.write_output_file

    def change_records(_seconds: float) -> None:
        if not errors:
            raise KeyboardInterrupt
        with (run / "metrics.jsonl").open("a") as file:
            file.write("\n")

    def write(flag: str, path: Path, text: str) -> None:
        if out.exists() and (error := errors.pop(0)):
            raise error
        wrote(flag, path, text)

    monkeypatch.setattr(report.time, "sleep", change_records)
    monkeypatch.setattr(report, "write_output_file", write)
    assert main(["report", str(run), "--watch", "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert [line.split("] ")[1] for line in printed.err.splitlines()] == [
        f"No such file or directory: '{out}'",
        "No space left on device",
    ]
    assert printed.out.count(f"{out}: ") == 2


def test_several_runs_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), str(run)]) == 0
    assert capsys.readouterr().out.count("training loss ") == 2


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "link/config.json", "checkpoints/step-00000020/manifest.json", ".lock"]
)
def test_the_runs_own_files_are_never_overwritten(
    file: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for flag in ("--html", "--json"):
        assert main(["report", str(run), flag, str(run / file)]) == 2
        assert "is a file of the run itself" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main(["report", str(run), "--json", str(run / "report.json")]) == 0


def test_a_run_without_metrics_leaves_the_old_report(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    page.write_text("old")
    assert main(["report", str(run), str(tmp_path / "gone"), "--html", str(page)]) == 2
    assert "gone" in capsys.readouterr().err
    assert page.read_text() == "old"


def plot_rows(chart: str) -> list[str]:
    """The plot area, from the top row to the bottom row, without labels and axes."""
    return [line.split("|", 1)[1] for line in chart.splitlines() if "|" in line]


def test_a_falling_line_runs_from_top_left_to_bottom_right() -> None:
    chart = draw_chart({"*": [(step, 10.0 - step) for step in range(1, 9)]}, width=8, height=8)
    assert plot_rows(chart) == [" " * column + "*" for column in range(8)]
    assert chart.splitlines()[0].startswith("    9.00 |")
    assert "    2.00 |" in chart
    assert chart.splitlines()[-1].split() == ["step", "1", "8"]


def test_the_level_is_part_of_the_range_and_points_are_drawn_over_it() -> None:
    rows = plot_rows(draw_chart({"*": [(1, 8.0), (5, 4.0)]}, level=6.0, width=5, height=5))
    assert rows == ["*", "", "-----", "", "    *"]
    rows = plot_rows(draw_chart({"*": [(1, 8.0), (5, 7.0)]}, level=6.0, width=5, height=3))
    assert rows == ["*", "    *", "-----"]


def test_later_series_cover_earlier_ones() -> None:
    rows = plot_rows(draw_chart({"*": [(1, 2.0), (3, 1.0)], "o": [(3, 1.0)]}, width=3, height=2))
    assert rows == ["*", "  o"]


def test_points_of_one_column_are_averaged() -> None:
    points = [(1, 4.0), (50, 1.0), (50, 3.0), (51, 2.0), (100, 0.0)]
    assert plot_rows(draw_chart({"*": points}, width=3, height=5))[2] == " *"


def test_a_single_point_and_a_flat_line_have_a_place() -> None:
    assert plot_rows(draw_chart({"*": [(7, 1.5)]}, width=3, height=2))[0] == "*"
    assert plot_rows(draw_chart({"*": [(1, 1.5), (3, 1.5)]}, width=3, height=2))[0] == "* *"


def test_a_loss_that_is_no_number_is_left_out() -> None:
    assert plot_rows(draw_chart({"*": [(1, 2.0), (2, math.nan), (3, 1.0)]}, width=3, height=2)) == ["*", "  *"]
    assert draw_chart({"*": [(1, math.nan)]}) == ""
    assert draw_chart({"*": []}) == ""
