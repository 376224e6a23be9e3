"""What the throughput model says that ranks exchange is what they exchange, in the types that it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.config.arguments import parse_run_config
from llmscale.memory.zero_settings import build_layout
from llmscale.planning.communication_time import Traffic, count_traffic
from llmscale.training.run_inputs import prepare_run
from tests.conftest import build_train_command

JOB = Path(__file__).with_name("traffic_job.py")


def predict(flags: list[str]) -> Traffic:
    """Of a step on two ranks."""
    resolved = prepare_run(parse_run_config(flags), world_size=2).resolved
    layout = build_layout(resolved.ds_config, resolved.plan.ranks, resolved.optimizer)
    compiled = "--compile" in flags
    return count_traffic(resolved.shape, layout, resolved.checkpointing, compiled_blocks=compiled)


#: Elements that stage 3 looks ahead by with every module -> how near the count is: of the tiny model's 22 modules one
#: owns a third of the parameters. DeepSpeed's own are 50,000,000.
BUCKETS = {50_000_000: 0.02, 0: 0.02, 5_000: 0.2}


@pytest.mark.parametrize(
    ("stage", "precision", "bucket", "flags"),
    [
        (3, "bf16", 50_000_000, ()),
        pytest.param(3, "bf16", 0, ("--compile", "on"), marks=pytest.mark.slow),
        *(pytest.param(3, "bf16", bucket, (), marks=pytest.mark.slow) for bucket in (0, 5_000)),
        *(pytest.param(stage, "bf16", 0, (), marks=pytest.mark.slow) for stage in (0, 1, 2)),
        *(pytest.param(stage, "autocast", 50_000_000, (), marks=pytest.mark.slow) for stage in (0, 1, 2, 3)),
    ],
)
def test_bytes_are_those_of_the_throughput_model(
    ranks: Callable, tiny_set: Path, tmp_path: Path, stage: int, precision: str, bucket: int, flags: tuple[str, ...]
) -> None:
    ds = tmp_path / "ds.json"
    stage_3 = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    keys = {**stage_3, "stage3_prefetch_bucket_size": bucket} if stage == 3 else {}
    ds.write_text(json.dumps({"zero_optimization": {"stage": stage, **keys}}))
    run = ("--ds", str(ds), "--precision", precision, "--micro-batch-size", "2", "--steps", "3", "--save-every", "0")
    command = build_train_command(tiny_set, tmp_path / "run", *run, *flags)
    expected = predict(command[1:])
    job = ranks([str(JOB), *command[1:]], 2)
    output = job.wait()[0]
    assert job.exit_codes == [0, 0], output
    carried = json.loads(next(line for line in output.splitlines() if line.startswith('{"carried"')))["carried"]
    assert carried.get("all_gather_into_tensor", 0) == pytest.approx(expected.gathered_bytes, rel=BUCKETS[bucket])
    # An all-reduce is two passes of a ring.
    reduced = 2 * carried.get("all_reduce", 0) + carried.get("reduce_scatter_tensor", 0)
    assert reduced == pytest.approx(expected.reduced_bytes, rel=0.02)
