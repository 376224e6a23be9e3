"""What the throughput model says that ranks exchange is what they exchange, in the types that it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.config.run_config import parse_run_config
from llmscale.planning.step_time import Traffic, count_traffic
from llmscale.training.prepare_run import prepare_run
from tests.conftest import build_train_command

JOB = Path(__file__).with_name("traffic_job.py")


def predict(flags: list[str]) -> Traffic:
    """Of a step on two ranks."""
    resolved = prepare_run(parse_run_config(flags), world_size=2).resolved
    return count_traffic(resolved, compiled_blocks="--compile" in flags)


#: Stage 3 that keeps nothing between modules, and looks ahead by so many elements with every one.
def nothing_kept(bucket: int = 50_000_000) -> dict[str, int]:
    return {
        **{"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0},
        "stage3_prefetch_bucket_size": bucket,
    }


#: And that keeps much: biases and norms between steps, and matrices from the forward pass to the backward pass.
MUCH_KEPT = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 20_000}
SOME_KEPT = {**MUCH_KEPT, "stage3_max_live_parameters": 60_000, "stage3_max_reuse_distance": 40_000}
COMPILED, RECOMPUTING = ("--compile", "on"), ("--activation-checkpointing", "full")


@pytest.mark.parametrize(
    ("stage", "precision", "keys", "flags"),
    [
        (3, "bf16", SOME_KEPT, RECOMPUTING),
        *(
            pytest.param(3, "bf16", keys, flags, marks=pytest.mark.slow)
            for keys in (nothing_kept(), nothing_kept(0), nothing_kept(5000), MUCH_KEPT, SOME_KEPT)
            for flags in ((), COMPILED, RECOMPUTING)
            if (keys, flags) != (SOME_KEPT, RECOMPUTING)
        ),
        *(pytest.param(stage, "bf16", {}, (), marks=pytest.mark.slow) for stage in (0, 1, 2)),
        *(
            pytest.param(stage, "autocast", nothing_kept() if stage == 3 else {}, (), marks=pytest.mark.slow)
            for stage in (0, 1, 2, 3)
        ),
    ],
)
def test_calls_and_bytes_are_those_of_the_throughput_model(
    ranks: Callable,
    tiny_set: Path,
    tmp_path: Path,
    stage: int,
    precision: str,
    keys: dict[str, int],
    flags: tuple[str, ...],
) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"zero_optimization": {"stage": stage, **keys}}))
    run = ("--ds", str(ds), "--precision", precision, "--micro-batch-size", "2", "--steps", "3", "--save-every", "0")
    command = build_train_command(tiny_set, tmp_path / "run", *run, *flags)
    expected = predict(command[1:])
    job = ranks([str(JOB), *command[1:]], 2)
    output = job.wait()[0]
    assert job.exit_codes == [0, 0], output
    counted = json.loads(next(line for line in output.splitlines() if line.startswith('{"carried"')))
    carried, calls = counted["carried"], counted["calls"]
    assert carried.get("all_gather_into_tensor", 0) == pytest.approx(expected.gathered_bytes, rel=0.02)
    # An all-reduce is two passes of a ring.
    reduced = 2 * carried.get("all_reduce", 0) + carried.get("reduce_scatter_tensor", 0)
    assert reduced == pytest.approx(expected.reduced_bytes, rel=0.02)
    if stage == 3:
        wanted = expected.collectives + expected.small_collectives
        assert calls["all_gather_into_tensor"] + calls["reduce_scatter_tensor"] == wanted
