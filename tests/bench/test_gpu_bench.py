"""A whole run of gpu.py as on an H100, with stand-ins for the processes: plans, numbers, constants and files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.config.hardware import get_gpu
from llmscale.config.run_arguments import parse_run_config
from llmscale.planning.kernels import kernel_efficiency
from llmscale.planning.step_time import estimate_compute_s
from llmscale.training.start import prepare_start
from scripts.bench.gpu import cells as cells_script
from scripts.bench.gpu import gpu as gpu_script
from scripts.bench.gpu.cells import Cell, Device, list_gpu_cells
from scripts.bench.gpu.gpu import Bench, read_rows
from scripts.bench.gpu.processes import OUT_OF_MEMORY, Step, Watched

H100 = Device("cuda", "NVIDIA H100 80GB HBM3", int(79.1 * 2**30), (9, 0))
GRID_ROW = {
    "peak_bytes": 10 * 2**30,
    "reserved_bytes": 12 * 2**30,
    "outside_torch_bytes": 600 * 2**20,
    "estimates": {"llmscale": 11 * 2**30},
}


def run_train(arguments: list[str], tokens: int, *_: object) -> Watched:
    """As fast as planning says; compiled 20 % less time, and a first step of 40 s."""
    resolved = prepare_start(parse_run_config(arguments), 1).resolved
    gpu, plan = get_gpu("h100-80gb"), resolved.plan
    seconds = estimate_compute_s(resolved.shape, plan.micro_batch_size, "bf16", resolved.checkpointing, gpu)
    assert seconds is not None and tokens == plan.tokens_per_step
    seconds *= plan.gradient_accumulation_steps
    is_compiled = arguments[arguments.index("--compile") + 1] == "on"
    step = Step(0.8 * seconds if is_compiled else seconds, 9 * 2**30, seconds)
    first = replace(step, seconds=step.seconds + (40 if is_compiled else 0))
    return Watched([first, *[step] * 10], None)


@pytest.fixture
def bench(tmp_path: Path, tiny_set: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """On the tests' own text: windows of 32 tokens, whatever a cell asks for."""
    monkeypatch.setattr(Bench, "prepared", lambda bench, seq_len: tiny_set)
    monkeypatch.setattr(gpu_script, "run_train", run_train)
    monkeypatch.setattr(gpu_script, "run_nanogpt", lambda *_: Watched([Step(1e-3)] * 9, None))
    monkeypatch.setattr(gpu_script.memory_grid, "measure", lambda *_: GRID_ROW)
    args = argparse.Namespace(out=tmp_path, write_readme=False, measure_s=1.0)
    machine = {"cpu": "a CPU", "cores": 2, "gpus": [], "torch": "2", "load_average": [0.0]}
    return Bench(args, H100, tmp_path, time.monotonic() + 1e6, machine, tmp_path)


def test_a_run_on_a_gpu_says_everything(bench: Bench, tmp_path: Path) -> None:
    cells = [cell for cell in list_gpu_cells() if cell.model in ("gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b")]
    cells = [cell for cell in cells if cell.offload == "none"]
    bench.run_all([*cells, Cell("grid", "gpt2-124m-z1-bf16-mb16-full")])
    result = json.loads((tmp_path / "gpu_h100-80gb.json").read_text())
    assert not [row["problem"] for row in result["rows"] if "problem" in row]
    for row in result["rows"]:
        if row["kind"] == "train":
            # The device's name is in the table, and a step is as fast as its efficiency allows.
            assert 0 < row["mfu"] < 1
            assert row["estimate_bytes"] > 0
            assert row["tokens_per_second"] * row["flops_per_token"] / 989e12 == pytest.approx(row["mfu"])
    constants = {constant["name"]: constant["measured"] for constant in result["constants"]}
    assert constants["CONTEXT_BYTES"] == 600 * 2**20
    assert constants["RESERVED_PER_ALLOCATED"] == pytest.approx(1.2)
    assert constants["_COMPILED_SAVES_BYTES"] > 0
    assert constants["_COMPILE_S"] == pytest.approx(40, rel=0.1)
    expected, actual = kernel_efficiency(get_gpu("h100-80gb")), result["efficiency"]["measured"]
    assert actual is None or actual["matmul"] == pytest.approx(expected.matmul, rel=1e-2)
    assert "nanoGPT gpt2-124m, compiled" in (tmp_path / "gpu_h100-80gb.md").read_text()
    text = (tmp_path / "gpu_h100-80gb.txt").read_text()
    assert "989 TFLOP/s" in text
    assert "MFU at 7-8B, bf16, at least 58%: not measured" in text


def test_what_does_not_fit_is_not_begun(bench: Bench, tmp_path: Path) -> None:
    small = Device("cuda", "NVIDIA L4", 22 * 2**30, (8, 9))
    bench.device = small
    bench.run_all([Cell("train", "gpt2-1.5b"), Cell("train", "gpt2-124m")])
    too_large, fits = bench.rows
    assert "GiB estimated, the GPU has 22" in too_large["problem"]
    assert fits["mfu"] is not None


def test_a_smaller_gpu_gets_a_smaller_micro_batch(bench: Bench, tmp_path: Path) -> None:
    cell = Cell("train", "gpt2-350m", micro_batch_sizes=(2**10, 2**6), tokens_per_step=2**24)
    chosen = []
    for gib in (79, 14):
        bench.device = replace(H100, memory_bytes=gib * 2**30)
        place = tmp_path / f"place-{gib}"
        place.mkdir()
        plan = bench.choose_plan(cell, place, cell.micro_batch_sizes)
        assert not isinstance(plan, str) and plan.estimate is not None
        assert plan.estimate.total_bytes <= gib * 2**30
        chosen.append((plan.micro_batch_size, plan.checkpointing))
    assert chosen[0] == (2**10, "none")
    assert chosen[1] != chosen[0]


def test_a_cell_that_runs_out_of_memory_is_tried_again_smaller(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def run(arguments: list[str], tokens: int, place: Path, *_: object) -> Watched:
        tried.append(int(arguments[arguments.index("--micro-batch-size") + 1]))
        (place / "log").write_text(f"output of {tried[-1]}")
        return Watched([], OUT_OF_MEMORY) if tried[-1] > 4 else run_train(arguments, tokens)

    monkeypatch.setattr(gpu_script, "run_train", run)
    pair = [Cell(kind, "gpt2-124m", micro_batch_sizes=(16, 8, 4), compared=True) for kind in ("train", "nanogpt")]
    bench.run_all(pair)
    assert tried == [16, 8, 4]
    # Both are compared at one micro-batch.
    assert [row["micro_batch_size"] for row in bench.rows] == [4, 4]
    log = (tmp_path / "gpu_h100-80gb.log").read_text()
    assert "== gpt2-124m, ZeRO-1, eager, micro-batch 8: out of memory\noutput of 8\n" in log
    monkeypatch.setattr(gpu_script, "run_train", lambda *_: Watched([], OUT_OF_MEMORY))
    assert bench.attempt(pair[0], 9) == {"problem": "micro-batch 4: out of memory"}
    monkeypatch.setattr(gpu_script, "run_train", lambda *_: Watched([], "ended with status 1"))
    assert bench.attempt(Cell("train", "gpt2-124m"), 10)["problem"].endswith(": ended with status 1")


def test_a_command_that_exits_is_a_problem_of_its_cell(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bench: Bench, seq_len: int) -> Path:
        sys.exit("llmscale data prepare ended with status 2")

    monkeypatch.setattr(Bench, "prepared", refuse)
    bench.run_all([Cell("train", "gpt2-124m")])
    assert bench.rows[0]["problem"] == "SystemExit: llmscale data prepare ended with status 2"


def test_what_an_earlier_command_measured_is_not_measured_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell("train", f"gpt2-{size}") for size in ("124m", "350m", "774m", "1.5b")]
    bench.run_all(cells[:3])
    written = tmp_path / "gpu_h100-80gb.json"
    earlier = read_rows(written, H100)
    assert [*earlier] == [cell.name for cell in cells[:3]]
    efficiency = json.loads(written.read_text())["efficiency"]
    again = Bench(bench.args, H100, tmp_path / "again", bench.deadline, bench.machine, "", resumed=earlier)
    (tmp_path / "again").mkdir()
    monkeypatch.setattr(gpu_script, "run_train", lambda *_: pytest.fail("measured again"))
    again.run_all(cells[:3])
    assert again.rows == bench.rows and again.efficiency() == efficiency
    with pytest.raises(SystemExit, match="was measured on NVIDIA H100 80GB HBM3, and this is NVIDIA L4"):
        read_rows(written, replace(H100, name="NVIDIA L4"))
    written.write_text("[]")
    with pytest.raises(SystemExit, match="is not a result of this script"):
        read_rows(written, H100)


def test_6_7b_with_offload_fits_a_host_of_128_gib(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_script, "host_memory_bytes", lambda: 128 << 30)
    (cell,) = [cell for cell in list_gpu_cells() if cell.model == "gpt3-6.7b"]
    (tmp_path / "place").mkdir()
    plan = bench.choose_plan(cell, tmp_path / "place", cell.micro_batch_sizes)
    assert not isinstance(plan, str), plan
