"""What the throughput model says that ranks exchange is what they exchange, in the types that it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.config.hardware import get_gpu, get_interconnect
from llmscale.config.run_arguments import parse_run_config
from llmscale.planning.step_time import Traffic, count_traffic, estimate_exchange_s
from llmscale.training.start import prepare_start
from tests.conftest import build_train_command, run_ranks, words

JOB = Path(__file__).with_name("traffic_job.py")


def predict(flags: list[str]) -> Traffic:
    """Of a step on two ranks."""
    resolved = prepare_start(parse_run_config(flags), world_size=2).resolved
    return count_traffic(resolved, compiled_blocks="--compile" in flags)


def count_exchanged(flags: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes and calls of a step on two ranks, by collective."""
    output = run_ranks([str(JOB), *flags], 2)
    counted = json.loads(next(line for line in output.splitlines() if line.startswith('{"carried"')))
    return counted["carried"], counted["calls"]


#: Stage 3 that keeps nothing between modules, and looks ahead by so many elements with every one.
def nothing_kept(bucket: int = 50_000_000) -> dict[str, int]:
    return {
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
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
    tiny_set: Path,
    tmp_path: Path,
    stage: int,
    precision: str,
    keys: dict[str, int],
    flags: tuple[str, ...],
) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"zero_optimization": {"stage": stage, **keys}}))
    run = words(f"--precision {precision} --micro-batch-size 2 --steps 3 --save-every 0")
    command = build_train_command(tiny_set, tmp_path / "run", "--ds", str(ds), *run, *flags)
    expected = predict(command[1:])
    carried, calls = count_exchanged(command[1:])
    assert carried.get("all_gather_into_tensor", 0) == pytest.approx(expected.gathered_bytes, rel=0.02)
    # An all-reduce is two passes of a ring.
    reduced = 2 * carried.get("all_reduce", 0) + carried.get("reduce_scatter_tensor", 0)
    assert reduced == pytest.approx(expected.reduced_bytes, rel=0.02)
    if stage == 3:
        wanted = expected.collectives + expected.small_collectives
        assert calls["all_gather_into_tensor"] + calls["reduce_scatter_tensor"] == wanted


@pytest.mark.parametrize(
    ("stage", "precision", "flags"),
    [
        (3, "bf16", ("--activation-checkpointing", "selective", "--n-kv-head", "1")),
        *(
            pytest.param(stage, precision, ("--activation-checkpointing", mode), marks=pytest.mark.slow)
            for stage, precision, mode in ((0, "fp32", "none"), (2, "autocast", "full"), (3, "bf16", "none"))
        ),
    ],
)
def test_divided_sequences_exchange_what_their_time_says(
    tiny_set: Path, tmp_path: Path, stage: int, precision: str, flags: tuple[str, ...]
) -> None:
    run = words(f"--ds zero{stage} --precision {precision} --micro-batch-size 2 --steps 3 --save-every 0")
    sizes = words("--n-head 4 --positions rotary --sequence-parallel-size 2")
    command = build_train_command(tiny_set, tmp_path / "run", *run, *sizes, *flags)
    resolved = prepare_start(parse_run_config(command[1:]), world_size=2).resolved
    # A link of 1 byte/s makes seconds of bytes, of which a rank sends half; 80 % of the rate are reached.
    slow = replace(get_gpu("h100-80gb"), link_bytes_per_s=1.0, memory_bytes_per_s=1e30)
    seconds = estimate_exchange_s(resolved, slow, 8, get_interconnect("ib-400g"))
    carried, calls = count_exchanged(command[1:])
    passes = 2 if "none" in flags else 3
    assert calls["all_to_all_single"] == 2 * passes * resolved.shape.n_layer * resolved.plan.gradient_accumulation_steps
    assert carried["all_to_all_single"] / 2 == pytest.approx(0.8 * seconds, rel=1e-4)
