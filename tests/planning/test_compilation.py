from __future__ import annotations

import pytest

from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import RunConfig
from llmscale.planning.compilation import FEWEST_STEPS, decide_compilation


def resolve(precision: str = "bf16", **zero: object) -> ResolvedRun:
    config = RunConfig.model_validate({"model": "gpt2-124m", "steps": 10_000, "precision": precision})
    ds = parse_ds_config({"zero_optimization": {"stage": 3, **zero}}, "test")
    return resolve_run(config, ds, SetFacts(50257, 1024, 10**6, 50256), world_size=8)


def test_auto_compiles_long_runs_on_gpus_alone() -> None:
    assert decide_compilation("auto", resolve(), "cuda", FEWEST_STEPS).backend == "inductor"
    short = decide_compilation("auto", resolve(), "cuda", FEWEST_STEPS - 1)
    assert short.backend is None and "fewer than 1,000 steps" in short.describe()
    for device in ("cpu", "xpu"):
        assert decide_compilation("auto", resolve(), device, 10**6).backend is None


def test_auto_leaves_blocks_alone_that_stage_3_does_not_keep_whole() -> None:
    assert decide_compilation("auto", resolve(stage3_max_live_parameters=10**6), "cuda", 10**6).backend is None


@pytest.mark.parametrize(
    ("device", "precision", "backend"),
    [
        ("cuda", "bf16", "inductor"),
        ("cpu", "fp32", "inductor"),
        ("cpu", "bf16", "aot_eager"),
        ("cpu", "fp16", "aot_eager"),
    ],
)
def test_on_compiles_whatever_the_run(device: str, precision: str, backend: str) -> None:
    decision = decide_compilation("on", resolve(precision), device, 10)
    assert decision.backend == backend
    assert ("inductor fails" in decision.describe()) is (backend == "aot_eager")
    assert decide_compilation("off", resolve(precision), device, 10**6).backend is None
