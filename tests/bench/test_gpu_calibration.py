from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpu_calibration import (
    MIB,
    Constant,
    compile_seconds,
    context_bytes,
    fit_efficiency,
    make_patch,
    reserved_per_allocated,
    saved_element_bytes,
)

from llmscale.config.hardware import get_gpu
from llmscale.config.presets import get_preset
from llmscale.planning.compute_time import OWN_KERNELS, token_work
from llmscale.planning.kernels import memory_bytes_per_s
from tests.conftest import REPOSITORY

MEMORY, COMPILING = "llmscale/memory/estimate.py", "llmscale/planning/compilation.py"
KERNELS = "llmscale/planning/kernels.py"


def test_context_is_the_largest_and_reserve_that_of_nine_in_ten() -> None:
    rows = [
        {"peak_bytes": 1000, "reserved_bytes": 1000 + 10 * n, "outside_torch_bytes": n * MIB + 1} for n in range(11)
    ]
    assert context_bytes(rows) == 11 * MIB
    assert reserved_per_allocated(rows) == pytest.approx(1.09)


def test_a_dry_run_and_a_failed_cell_calibrate_nothing() -> None:
    rows = [{"peak_bytes": 1000, "least_gpu_bytes": 1100}, {"problem": "out of memory"}]
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


def test_the_patch_applies_and_the_sources_then_say_what_was_measured(tmp_path: Path) -> None:
    constants = [
        Constant("CONTEXT_BYTES", MEMORY, 2**30, 517 * MIB, "a test"),
        Constant("RESERVED_PER_ALLOCATED", MEMORY, 1.1, 1.07, "a test"),
        Constant("_COMPILE_S", COMPILING, 60.0, 41.26, "a test"),
        Constant("_COMPILED_SAVES_BYTES", KERNELS, 27, None, "a test"),
    ]
    patch = make_patch(REPOSITORY, constants)
    before = {}
    for home in (MEMORY, COMPILING):
        (tmp_path / home).parent.mkdir(parents=True)
        before[home] = (REPOSITORY / home).read_text()
        (tmp_path / home).write_text(before[home])
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    memory, compiling = ((tmp_path / home).read_text() for home in (MEMORY, COMPILING))
    assert "#: Measured: a test.\nCONTEXT_BYTES = 517 * 2**20\n" in memory
    assert "#: Measured: a test.\nRESERVED_PER_ALLOCATED = 1.07\n" in memory
    assert "_COMPILE_S = 41.3\n" in compiling
    assert memory.count("\n") <= before[MEMORY].count("\n")
    compile(memory, MEMORY, "exec")


def test_every_constant_is_where_it_is_said_to_be() -> None:
    with pytest.raises(ValueError, match="has 0 lines 'NOWHERE = "):
        make_patch(REPOSITORY, [Constant("NOWHERE", MEMORY, 1.0, 2.0, "a test")])
    assert make_patch(REPOSITORY, [Constant("CONTEXT_BYTES", MEMORY, 2**30, None, "a test")]) == ""
