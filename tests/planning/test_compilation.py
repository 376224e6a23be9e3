from __future__ import annotations

import pytest

from llmscale.config.deepspeed.schema import parse_ds_config
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import CompileMode, RunConfig
from llmscale.planning.compilation import Compilation, decide_compilation

H100 = "NVIDIA H100 80GB HBM3"


def resolve(steps: int, precision: str = "bf16") -> ResolvedRun:
    config = RunConfig.model_validate({"model": "gpt2-124m", "steps": steps, "precision": precision})
    return resolve_run(
        config,
        parse_ds_config({"zero_optimization": {"stage": 2}}, "test"),
        SetFacts(50257, 1024, 10**6, 50256),
        world_size=8,
    )


def decide(
    mode: CompileMode, run: ResolvedRun, device_type: str = "cuda", name: str = H100, left: int | None = None
) -> Compilation:
    steps_left = run.total_steps if left is None else left
    return decide_compilation(mode, run, device_type=device_type, device_name=name, steps_left=steps_left)


def test_auto_compiles_long_runs_on_gpus_alone() -> None:
    long = resolve(100_000)
    assert decide("auto", long).backend == "inductor"
    assert decide("auto", long, left=10).backend is None, "what is left counts"
    assert decide("auto", resolve(10)).backend is None
    assert decide("auto", long, "cpu", "cpu").backend is None
    assert decide("auto", long, "xpu", "a GPU of another vendor").backend is None


def test_an_unknown_gpu_is_taken_for_the_fastest_one() -> None:
    run = resolve(100_000)
    least = next(left for left in range(0, run.total_steps, 100) if decide("auto", run, left=left).backend)
    unknown = decide("auto", run, name="NVIDIA Z9000", left=least)
    assert unknown.backend is None
    assert "on the fastest GPU that is known" in unknown.describe()
    assert decide("auto", run, name="NVIDIA Z9000").backend == "inductor"


@pytest.mark.parametrize(
    ("device", "precision", "backend"),
    [
        *[("cuda", "bf16", "inductor"), ("cpu", "fp32", "inductor")],
        *[("cpu", precision, "aot_eager") for precision in ("bf16", "fp16", "autocast")],
    ],
)
def test_on_compiles_whatever_the_run(device: str, precision: str, backend: str) -> None:
    decision = decide("on", resolve(10, precision), device, "cpu" if device == "cpu" else H100)
    assert decision.backend == backend
    assert ("inductor fails" in decision.describe()) is (backend == "aot_eager")
    assert decide("off", resolve(100_000, precision), device).backend is None
