from __future__ import annotations

import pytest

from llmscale.config.hardware import get_gpu
from llmscale.config.presets import get_preset
from llmscale.planning.kernels import memory_bytes_per_s
from llmscale.planning.step_time import OWN_KERNELS, token_work
from scripts.bench.gpu.results import (
    BEGIN,
    END,
    MIB,
    compile_seconds,
    constant_lines,
    context_bytes,
    fit_efficiency,
    judge_targets,
    readme_table,
    replace_table,
    reserved_per_allocated,
    row_line,
    saved_element_bytes,
)


def row(**values: object) -> dict[str, object]:
    usual = {
        "kind": "train",
        "cell": "cell",
        "model": "gpt2-124m",
        "n_layer": None,
        "turn": 1,
        "compared": True,
        "micro_batch_size": 16,
        "checkpointing": "none",
        "tokens_per_second": 5e5,
        "mfu": 0.45,
        "first_step_s": 40.0,
        "peak_bytes": 8 * 2**30,
        "estimate_bytes": 9 * 2**30,
    }
    return {**usual, **values}


def test_a_row_says_its_numbers_or_why_it_has_none() -> None:
    line = row_line(row())
    for words in ("500,000", "45.0%", "8.00", "9.00", "+12.5%"):
        assert words in line
    assert "not measured: out of memory" in row_line({"cell": "large", "kind": "train", "problem": "out of memory"})
    assert "-" in row_line(row(mfu=None, peak_bytes=None, estimate_bytes=None))
    grid = row_line(row(kind="grid", reserved_bytes=2**33, outside_torch_bytes=2**29))
    assert "reserved 8.00, outside 0.50" in grid


def test_targets_are_met_not_met_or_not_measured() -> None:
    rows = [row(mfu=0.51), row(model="gpt2-1.5b", mfu=0.5499), {**row(model="llama3-8b"), "problem": "out of memory"}]
    rows[2].pop("mfu")
    rows += [row(kind="nanogpt", tokens_per_second=4e5, mfu=0.9)]
    lines = judge_targets(rows, "h100-80gb")
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["met", "NOT met", "not measured", "met"]
    assert "1.25 times" in lines[3]


def test_the_slower_turn_of_the_comparison_counts() -> None:
    rows = [row(kind=kind, turn=turn, tokens_per_second=rate) for kind, turn, rate in (
        ("train", 1, 110.0), ("nanogpt", 1, 100.0), ("nanogpt", 2, 100.0), ("train", 2, 99.0), ("train", 3, 500.0),
    )]  # fmt: skip
    assert "NOT met, 1.10, 0.99 times" in judge_targets(rows, "h100-80gb")[3]


def test_a_part_of_a_model_is_told_and_does_not_meet_its_target() -> None:
    line = judge_targets([row(model="llama3-8b", n_layer=8, mfu=0.7)], "h100-80gb")[2]
    assert "not measured (8 of its 32 blocks without offload: 70.0%)" in line


@pytest.mark.parametrize("gpu", [None, "a100-80gb"])
def test_another_device_is_not_what_the_targets_are_for(gpu: str | None) -> None:
    assert "the targets are for one H100" in judge_targets([], gpu)[-1]


def test_a_cpu_meets_no_target() -> None:
    lines = judge_targets([row(mfu=None), row(kind="nanogpt", mfu=None)], None, is_gpu=False)
    assert [line.endswith(": not measured") for line in lines[:4]] == [True] * 4
    assert "a CPU" in lines[4]


def test_the_table_takes_the_place_of_the_one_before() -> None:
    readme = f"# Title\n\n{BEGIN}\nold\n{END}\n\nAfter\n"
    table = readme_table(
        [row(cell="gpt2-124m, ZeRO-1"), {"cell": "x", "problem": "no time"}], "H100", ["a target: met"]
    )
    new = replace_table(readme, table)
    assert new.startswith("# Title\n\n<!--")
    assert new.endswith(f"{END}\n\nAfter\n")
    assert "old" not in new
    assert "| gpt2-124m, ZeRO-1 | 16 | 500,000 | 45.0% | 8.00 | 9.00 |" in new
    assert "no time" not in new
    assert replace_table(new, table) == new


@pytest.mark.parametrize("readme", ["# Title\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"])
def test_a_readme_without_its_markers_is_refused(readme: str) -> None:
    with pytest.raises(ValueError, match="gpu-table:begin"):
        replace_table(readme, "")


def test_constants_are_shown_beside_what_is_assumed() -> None:
    constants = [
        {"home": "a.py", "name": "A", "assumed": 1.1, "measured": 1.25},
        {"home": "b.py", "name": "B", "assumed": 2, "measured": None},
    ]
    assert constant_lines(constants) == ["a.py A: assumed 1.1, measured 1.25", "b.py B: assumed 2, not measured"]


def test_context_is_the_largest_and_reserve_that_of_nine_in_ten() -> None:
    rows = [
        {"peak_bytes": 1000, "reserved_bytes": 1000 + 10 * n, "outside_torch_bytes": n * MIB + 1} for n in range(11)
    ]
    assert context_bytes(rows) == 11 * MIB
    assert reserved_per_allocated(rows) == pytest.approx(1.09)


def test_a_dry_run_and_a_failed_cell_calibrate_nothing() -> None:
    rows = [{"peak_bytes": 1000}, {"problem": "out of memory"}]
    assert context_bytes(rows) is None
    assert reserved_per_allocated(rows) is None
    assert compile_seconds([]) is saved_element_bytes([], get_gpu("h100-80gb")) is None


def test_what_compiling_costs_and_saves() -> None:
    assert compile_seconds([(5, 45), (2, 32), (1, 91)]) == 40
    gpu = get_gpu("h100-80gb")
    s_per_byte = 1 / memory_bytes_per_s(gpu)
    pairs = [(1e6, 1e-4, 1e-4 - 1e6 * saved * s_per_byte) for saved in (20, 27, 35)]
    assert saved_element_bytes(pairs, gpu) == pytest.approx(27)


def test_compiling_that_costs_or_saves_nothing_calibrates_nothing() -> None:
    assert compile_seconds([(5, 1.8), (5, 1.8)]) is compile_seconds([(5, 5)]) is None
    gpu = get_gpu("h100-80gb")
    assert saved_element_bytes([(1e6, 1.0, 1.2)], gpu) is saved_element_bytes([(1e6, 1.0, 0.996)], gpu) is None
    assert saved_element_bytes([(1e6, 1.0, 0.995)], gpu) == pytest.approx(0.005e-6 * memory_bytes_per_s(gpu))


def test_the_fit_finds_the_efficiency_that_made_the_times() -> None:
    gpu, runs = get_gpu("h100-80gb"), []
    for name, seq_len in (("gpt2-124m", 1024), ("gpt2-1.5b", 1024), ("gpt2-350m", 4096)):
        work = token_work(get_preset(name).shape(50257, seq_len), 8 * seq_len, "bf16", "none", OWN_KERNELS)
        flops = work.matmul_flops / 0.7 + work.attention_flops / 0.4
        runs.append((work, flops / gpu.dense_16bit_flops + work.moved_bytes / memory_bytes_per_s(gpu)))
    assert fit_efficiency(runs, gpu) == pytest.approx((0.7, 0.4), rel=1e-6)
    assert fit_efficiency(runs[:2], gpu) is None
    assert fit_efficiency([(work, seconds / 10) for work, seconds in runs], gpu) is None
