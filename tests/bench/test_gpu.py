"""gpu.py's plan of cells, its budget of time, and in the slow suite all of it on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.presets import PRESETS
from scripts.bench.gpu import cells as cells_script
from scripts.bench.gpu import gpu
from scripts.bench.gpu.cells import Cell, Device, list_cpu_cells, list_gpu_cells
from scripts.bench.gpu.gpu import Bench, describe_cell, expected_s
from scripts.bench.memory.memory_grid import list_cells
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "bench" / "gpu.sh"
CPU = Device("cpu", "cpu", None, None)


@pytest.mark.parametrize("cells", [list_gpu_cells(), list_cpu_cells()], ids=["gpu", "cpu"])
def test_every_cell_is_one_that_can_be_run(cells: list[Cell]) -> None:
    assert max(Counter(cell.name for cell in cells).values()) == 1
    grid = {cell.name for cell in list_cells()}
    for cell in cells:
        if cell.kind == "grid":
            assert cell.model in grid
            continue
        assert cell.model in PRESETS
        parse_ds_config(cell.ds_config("bf16"), cell.name)
        assert all(cell.tokens_per_step % (micro * cell.seq_len) == 0 for micro in cell.micro_batch_sizes)
    compared = [cell for cell in cells if cell.compared]
    assert {cell.kind for cell in compared} == {"train", "nanogpt"}
    assert len({(c.micro_batch_sizes, c.tokens_per_step, c.compiled, c.model) for c in compared}) == 1
    assert all(cell.zero_stage == 1 for cell in compared)


def make_bench(tmp_path: Path, seconds: float) -> Bench:
    args = argparse.Namespace(out=tmp_path, write_readme=False, measure_s=1.0)
    machine = {"cpu": "a CPU", "cores": 2, "gpus": [], "torch": "2", "load_average": [0.0]}
    return Bench(args, CPU, tmp_path, time.monotonic() + seconds, machine, "no nanoGPT")


def test_what_there_is_no_time_for_is_said_and_what_fits_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = []

    def measure(bench: Bench, cell: Cell, number: int) -> dict[str, object]:
        run.append(cell.name)
        assert json.loads((tmp_path / "gpu_cpu.json").read_text())["rows"] if len(run) > 1 else True
        return {"problem": "of no interest"}

    monkeypatch.setattr(Bench, "measure", measure)
    cells = [Cell("train", "gpt2-124m"), Cell("train", "gpt2-1.5b", least_s=1000), Cell("train", "gpt2-350m")]
    bench = make_bench(tmp_path, 100)
    bench.run_all(cells)
    assert run == [cells[0].name, cells[2].name]
    rows = json.loads((tmp_path / "gpu_cpu.json").read_text())["rows"]
    assert [row["cell"] for row in rows] == [cell.name for cell in cells]
    assert "1000 needed" in rows[1]["problem"]
    text = (tmp_path / "gpu_cpu.txt").read_text()
    assert text.count("not measured") >= 3 + 4


def test_a_stop_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: Bench, cell: Cell, number: int) -> dict[str, object]:
        if number == 2:
            raise KeyboardInterrupt
        raise ValueError("a cell's own failure")

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert gpu.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = json.loads((tmp_path / "gpu_cpu.json").read_text())["rows"]
    assert [row["cell"] for row in rows] == [cell.name for cell in list_cpu_cells()]
    assert rows[0]["problem"] == "ValueError: a cell's own failure"
    assert {row["problem"] for row in rows[1:]} == {"stopped before it"}


def test_a_cell_is_expected_to_take_as_long_as_its_kind_took() -> None:
    cell = Cell("train", "gpt2-124m", least_s=10)
    took = [{**describe_cell(cell), "wall_s": seconds} for seconds in (30.0, 50.0, 70.0)]
    others = [{**describe_cell(Cell("train", "gpt2-124m", compiled=True)), "wall_s": 500.0}]
    assert expected_s(cell, []) == 10
    assert expected_s(cell, others + took) == 50
    assert expected_s(cell, [{**took[0], "problem": "out of memory"}]) == 10


def run_gpu(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=timeout_s)


def test_a_machine_without_a_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_script, "_ASK", "1 / 0")
    with pytest.raises(SystemExit, match=r"error: torch sees no CUDA GPU.*--device cpu"):
        cells_script.find_device("cuda")


@pytest.mark.slow
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    answer = run_gpu("--device", "cpu", "--minutes", "60", "--out", str(tmp_path), timeout_s=3000)
    assert answer.returncode == 0, answer.stderr
    rows = {row["cell"]: row for row in json.loads((tmp_path / "gpu_cpu.json").read_text())["rows"]}
    assert len(rows) == len(list_cpu_cells())
    problems = {name: row["problem"] for name, row in rows.items() if "problem" in row}
    assert list(problems) == ["nanoGPT tiny-1m, 1 blocks, eager"], answer.stdout
    for row in rows.values():
        if row["kind"] == "train":
            assert row["tokens_per_second"] > 0
            assert row["mfu"] is None
            assert row["steps"] >= 2
    assert answer.stdout.count("not measured") >= 8
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".txt", ".md"}
