"""What train.py says about memory: before step 1, after step 2, and when there is not enough of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.config.run_arguments import parse_run_config
from llmscale.engine.device_memory import MeasuredMemory
from llmscale.memory.estimate import estimate_memory
from llmscale.training.start import (
    OutOfMemory,
    Start,
    estimate_line,
    explain_out_of_memory,
    explained_out_of_memory,
    is_out_of_memory,
    measured_line,
    prepare_start,
)
from tests.conftest import read_events

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prepared(tiny_set: Path, tmp_path: Path) -> Callable[..., Start]:
    """`prepared(*flags)`: gpt2-124m at stage 2 on the tiny set's 32 tokens, 2 ranks."""

    def prepare(*flags: str, world_size: int = 2) -> Start:
        given = ["--data", str(tiny_set), "--run", str(tmp_path / "run")]
        given += [] if "--ds" in flags else ["--ds", str(ROOT / "ds_configs/zero2.json")]
        return prepare_start(
            parse_run_config([*given, "--model", "gpt2-124m", "--global-batch-size", "2048", *flags]), world_size
        )

    return prepare


def test_the_line_before_step_1(prepared: Callable[..., Start]) -> None:
    run = prepared()
    estimate = estimate_memory(run.resolved, None)
    on_gpu = estimate_line(estimate, 24 * GIB)
    assert on_gpu.startswith("memory: estimated peak ")
    assert "of 24.00 GiB with the allocator's reserve and the CUDA context" in on_gpu
    for part in ("parameters", "gradients", "optimizer", "GiB per GPU"):
        assert part in on_gpu
    assert "nothing to compare it with on a CPU" in estimate_line(estimate, None)


def test_adafactor_out_of_memory_is_not_sent_to_a_stage_that_it_cannot_run(prepared: Callable[..., Start]) -> None:
    run = prepared("--optimizer", "adafactor", "--ds", str(ROOT / "ds_configs/zero0.json"))
    assert "ZeRO stage" not in explain_out_of_memory(run, "CUDA out of memory.", GIB // 64)


def test_the_measured_peak_stands_beside_the_estimate(prepared: Callable[..., Start]) -> None:
    run = prepared()
    estimate = estimate_memory(run.resolved, None)
    assert estimate is not None
    low = MeasuredMemory(int(estimate.allocated_bytes / 1.25), estimate.allocated_bytes)
    assert measured_line(estimate, low).endswith("is 25.0% above")
    high = MeasuredMemory(2 * estimate.allocated_bytes, 3 * estimate.allocated_bytes)
    assert measured_line(estimate, high).endswith("is 50.0% below")


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, yes: bool) -> None:
    assert is_out_of_memory(error) == yes


def test_other_errors_pass_unchanged(prepared: Callable[..., Start]) -> None:
    with pytest.raises(RuntimeError, match=r"^a bug$"), explained_out_of_memory(prepared()):
        raise RuntimeError("a bug")


def test_the_explanation_has_the_breakdown_and_the_smallest_change(prepared: Callable[..., Start]) -> None:
    run = prepared("--micro-batch-size", "1024")
    with pytest.raises(OutOfMemory) as caught, explained_out_of_memory(run):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    first, second, third = str(caught.value).splitlines()
    assert first == "rank 0 ran out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. more"
    assert second.startswith("  memory: estimated peak ")
    assert "activations 9." in second
    assert third.startswith("  the smallest change that fits: --micro-batch-size 512 instead of 1024 (")


def test_the_change_fits_the_card_and_not_only_less(prepared: Callable[..., Start]) -> None:
    run = prepared("--micro-batch-size", "1024")
    estimate = estimate_memory(run.resolved, None)
    assert estimate is not None
    card = estimate.total_bytes // 2
    third = explain_out_of_memory(run, "CUDA out of memory.", card).splitlines()[2]
    size = int(third.split("--micro-batch-size ")[1].split()[0])
    smaller = prepared("--micro-batch-size", str(size))
    fitting = estimate_memory(smaller.resolved, None)
    assert fitting is not None
    assert fitting.total_bytes <= card


def test_when_no_change_is_enough_it_says_so(prepared: Callable[..., Start]) -> None:
    third = explain_out_of_memory(prepared(), "CUDA out of memory.", GIB // 4).splitlines()[2]
    assert third.startswith("  no smaller micro-batch, recomputation, higher stage or offload to the host is enough")


def test_where_the_tensors_alone_would_fit_the_allocator_is_named(
    prepared: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared()
    estimate = estimate_memory(run.resolved, None)
    assert estimate is not None
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with_gaps = explain_out_of_memory(run, "CUDA out of memory.", estimate.total_bytes)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in with_gaps.splitlines()[3]
    too_small = explain_out_of_memory(run, "CUDA out of memory.", estimate.allocated_bytes)
    assert "expandable_segments" not in too_small
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "expandable_segments" not in explain_out_of_memory(run, "CUDA out of memory.", estimate.total_bytes)


#: train.py with one thing changed: rank 1 asks for too much memory in its second step.
_RUNS_OUT = """
import os, sys
import torch
from llmscale.training import session
from llmscale.train import main

train_step = session.train_step

def step(engine, *rest):
    if os.environ["RANK"] == "1" and engine.global_steps == 1:
        torch.empty(2**58)
    return train_step(engine, *rest)

session.train_step = step
status = main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""


def test_a_rank_that_runs_out_explains_and_no_rank_hangs(
    ranks: Callable[..., object], train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    script = tmp_path / "runs_out.py"
    script.write_text(_RUNS_OUT)
    job = ranks([str(script), *train_command("--steps", "4", "--micro-batch-size", "4")[1:]], 2)
    outputs = job.wait()  # type: ignore[attr-defined]
    codes = job.exit_codes  # type: ignore[attr-defined]
    assert codes[1] == 1
    assert codes[0] not in (0, None)
    assert "error: rank 1 ran out of memory: " in outputs[1]
    assert "can't allocate memory" in outputs[1]
    assert "memory: estimated peak " in outputs[1]
    assert "the smallest change that fits: --" in outputs[1]
    assert "Traceback" not in outputs[1]
    assert "step      1/4" in outputs[0]


#: train.py on a GPU, as far as its memory goes: the peaks are given.
_MEASURES = """
import os, sys
from llmscale.engine.device_memory import MeasuredMemory
from llmscale.train import main
from llmscale.training import reports

reports.measured_memory = lambda: MeasuredMemory(3 * 2**30, 4 * 2**30)
status = main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""


def test_after_step_2_the_measured_peak_is_printed_and_recorded(
    ranks: Callable[..., object], train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    script = tmp_path / "measures.py"
    script.write_text(_MEASURES)
    (output,) = ranks([str(script), *train_command("--steps", "3")[1:]], 1).wait()  # type: ignore[attr-defined]
    lines = output.splitlines()
    measured = next(i for i, line in enumerate(lines) if line.startswith("memory: measured peak 3.00 GiB allocated"))
    assert "4.00 GiB reserved" in lines[measured]
    assert "below" in lines[measured]
    step_2, step_3 = (next(i for i, line in enumerate(lines) if f"step      {n}/3" in line) for n in (2, 3))
    assert step_2 - 1 <= measured < step_3
    estimated = next(i for i, line in enumerate(lines) if line.startswith("memory: estimated peak"))
    assert estimated < measured
    (record,) = read_events(tmp_path / "run", "memory")
    assert record["allocated_bytes"] == 3 * GIB
    assert record["reserved_bytes"] == 4 * GIB
    assert 0 < record["estimated_bytes"] < 3 * GIB
    assert record["step"] == 2
