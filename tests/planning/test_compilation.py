from __future__ import annotations

import pytest

from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.hardware import get_interconnect
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import CompileMode, RunConfig
from llmscale.planning.compilation import Compilation, decide_compilation

H100 = "NVIDIA H100 80GB HBM3"


def resolve(steps: int, precision: str = "bf16", stage: int = 2, world_size: int = 8, **keys: object) -> ResolvedRun:
    config = RunConfig.model_validate({"model": "gpt2-124m", "steps": steps, "precision": precision, **keys})
    return resolve_run(
        config,
        parse_ds_config({"zero_optimization": {"stage": stage}}, "test"),
        SetFacts(50257, 1024, 10**6, 50256),
        world_size=world_size,
    )


def decide(
    mode: CompileMode,
    run: ResolvedRun,
    device_type: str = "cuda",
    name: str = H100,
    left: int | None = None,
    network: str | None = None,
) -> Compilation:
    return decide_compilation(
        mode,
        run,
        device_type=device_type,
        device_name=name,
        steps_left=run.total_steps if left is None else left,
        gpus_per_node=8,
        network=get_interconnect(network) if network else None,
    )


def test_auto_compiles_long_runs_on_gpus_alone() -> None:
    long = resolve(100_000)
    assert decide("auto", long).backend == "inductor"
    assert decide("auto", long, left=10).backend is None, "what is left counts"
    assert decide("auto", resolve(10)).backend is None
    assert decide("auto", long, "cpu", "cpu").backend is None
    assert decide("auto", long, "xpu", "a GPU of another vendor").backend is None


def test_auto_leaves_stage_3_on_a_slow_network_alone() -> None:
    """A compiled block is gathered in other portions, and more is gathered twice."""
    large = {"model": "gpt3-1.3b", "micro_batch_size": 4}
    runs = {stage: resolve(100_000, stage=stage, world_size=32, **large) for stage in (2, 3)}
    assert decide("auto", runs[3], network="ib-400g").backend == "inductor"
    slow = decide("auto", runs[3], network="ethernet-25g")
    assert slow.backend is None
    assert "25 Gbit/s" in slow.describe()
    assert decide("auto", runs[3]).backend is None, "nobody knows how fast it is"
    for network in ("ethernet-25g", None):
        assert decide("auto", runs[2], network=network).backend == "inductor"
        one_node = resolve(100_000, stage=3, **large)
        assert decide("auto", one_node, network=network).backend == "inductor"
    assert decide("on", runs[3], network="ethernet-25g").backend == "inductor"


def test_an_unknown_gpu_is_taken_for_the_one_that_saves_least() -> None:
    run = resolve(100_000)
    least = next(left for left in range(0, run.total_steps, 100) if decide("auto", run, left=left).backend)
    unknown = decide("auto", run, name="NVIDIA Z9000", left=least)
    assert unknown.backend is None
    assert "on any GPU that is known" in unknown.describe()
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
