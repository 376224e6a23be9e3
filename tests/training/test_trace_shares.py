from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.errors import LlmscaleError
from llmscale.training.profiler import PARTS, PHASE, WHOLE, part_of, read_shares, shares_of_events


def event(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "args": args}


def note(name: str, begin: float, end: float) -> dict:
    return event(name, begin, end, "user_annotation")


def seconds(events: list[dict]) -> dict[str, float]:
    """In microseconds, without what is 0; the sum is checked."""
    shares = shares_of_events(events)
    assert sum(shares.seconds.values()) == pytest.approx(shares.wall_s)
    assert tuple(shares.seconds) == PARTS
    return {part: round(1e6 * value) for part, value in shares.seconds.items() if value}


def test_every_instant_of_a_cpu_belongs_to_the_innermost_operation() -> None:
    found = seconds(
        [
            note(WHOLE, 0, 100),
            event("aten::linear", 10, 30),
            event("aten::t", 10, 12),
            event("aten::addmm", 12, 29),
            event("aten::layer_norm", 30, 40),
            event("aten::gelu", 40, 45),
            event("_ChunkedCrossEntropy", 50, 70),
            event("aten::mm", 55, 60),
            event("aten::scaled_dot_product_attention", 70, 80),
            event("aten::bmm", 72, 78),
            event("outside", 100, 120),
        ]
    )
    assert found == {
        "matrix products": 25,
        "norms": 10,
        "other operations": 5,
        "loss": 15,
        "attention": 10,
        "idle": 35,
    }


def test_phases_say_what_is_data_and_what_is_the_optimizer() -> None:
    found = seconds(
        [
            note(WHOLE, 0, 100),
            note(f"{PHASE}data_wait", 0, 20),
            event("aten::to", 5, 10),
            note(f"{PHASE}forward_backward", 20, 60),
            event("aten::mul", 20, 30),
            note(f"{PHASE}optimizer_step", 60, 100),
            event("aten::mul", 60, 80),
            event("aten::mm", 85, 90),
        ]
    )
    assert found == {"data": 20, "other operations": 10, "optimizer": 25, "idle": 45}


def test_communication_is_what_is_not_hidden_behind_arithmetic() -> None:
    found = seconds(
        [note(WHOLE, 0, 100), event("aten::mm", 0, 40), event("gloo:all_reduce", 20, 70, "user_annotation", 2)]
    )
    assert found == {"matrix products": 40, "communication": 30, "idle": 30}


def test_a_kernel_is_of_the_operation_that_launched_it() -> None:
    """On a GPU the host's times count for nothing."""
    found = seconds(
        [
            note(WHOLE, 0, 100),
            event("aten::layer_norm", 0, 10),
            event("cudaLaunchKernel", 2, 3, "cuda_runtime", correlation=7),
            event("void vectorized_elementwise_kernel", 30, 50, "kernel", 99, correlation=7),
            event("sm90_xmma_gemm_bf16", 50, 60, "kernel", 99, correlation=8),
            event("ncclDevKernel_AllReduce", 55, 80, "kernel", 98, correlation=9),
            event("unknown", 80, 81, "kernel", 99),
        ]
    )
    assert found == {"norms": 20, "matrix products": 10, "communication": 20, "other operations": 1, "idle": 49}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("autograd::engine::evaluate_function: NativeLayerNormBackward0", "norms"),
        ("FusedRmsNormBackward0", "norms"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "attention"),
        ("aten::_efficient_attention_backward", "attention"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("c10d::_reduce_scatter_base_", "communication"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("_ChunkedCrossEntropyBackward", "loss"),
        ("nvjet_hsh_128x256", "matrix products"),
        ("aten::embedding", "other operations"),
    ],
)
def test_names(name: str, part: str) -> None:
    assert part_of([name], is_operation=True) == part


def test_a_trace_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ("{}", '{"traceEvents": 3}', json.dumps({"traceEvents": [event("aten::mm", 0, 1)]})):
        path.write_text(text)
        with pytest.raises(LlmscaleError):
            read_shares(path)


def test_numbers_that_json_does_not_know_are_none_of_its_business(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    whole = {"ph": "X", "cat": "user_annotation", "name": WHOLE, "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    other = {"ph": "M", "name": "memory", "args": {"rate": float("inf"), "address": 2**70}}
    path.write_text(json.dumps({"traceEvents": [whole, other]}))
    assert read_shares(path).wall_s == pytest.approx(5e-6)
