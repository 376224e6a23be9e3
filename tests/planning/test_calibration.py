"""What the throughput model says of itself: within the rows it was fitted to, and beyond them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.hardware import Cluster, get_gpu, get_interconnect
from llmscale.config.optimizers import ADAMW, MUON, OptimizerSpec
from llmscale.planning.calibration import FITTED, SEEN_BEYOND, SMALLEST_MICRO_BATCH_TOKENS
from llmscale.planning.step_time import Throughput, estimate_step
from tests.planning.published_runs import published_runs, read_rows
from tests.planning.test_step_time import MPT

SEVEN_B = GPTShape(32, 32, 4096, 50368, 2048)
STAGE_3: dict[str, object] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def estimate(
    step_of,
    shape: GPTShape,
    *,
    gpus: int,
    gpu: str = "a100-80gb",
    ds: dict | None = None,
    micro: int = 4,
    network: str | None = None,
    optimizer: OptimizerSpec = ADAMW,
) -> Throughput:
    plan = build_batch_plan(
        global_batch_size=8 * micro * gpus, ranks=ParallelLayout(gpus), seq_len=shape.seq_len, micro_batch_size=micro
    )
    interconnect = get_interconnect(network or ("ib-200g" if gpu.startswith("a100") else "ib-400g"))
    step = step_of(ds or STAGE_3, shape, plan, "full", optimizer)
    found = estimate_step(step, Cluster(get_gpu(gpu), min(8, gpus), interconnect))
    assert found is not None
    return found


def test_a_run_within_the_rows_is_calibrated_and_says_their_range_and_error(step_of) -> None:
    found = estimate(step_of, SEVEN_B, gpus=64)
    assert found.beyond == ()
    assert found.calibration.startswith(
        "calibrated: A100 rows of llm-foundry (8-128 GPUs, 125M-70B parameters, contexts of 512-65,536"
    )
    assert "2 % in the median, 7 %" in found.error


@pytest.mark.parametrize(
    ("changes", "beyond", "seen"),
    [
        ({"gpus": 992}, "992 GPUs", "5 published runs like it reached 0.48 to 0.87 times"),
        ({"gpus": 1}, "1 GPU", "no published run like it"),
        ({"shape": GPTShape(96, 96, 12288, 50368, 2048)}, "175B parameters", "5 published runs like it reached 0.48"),
        ({"shape": GPTShape(4, 4, 128, 257, 2048)}, "1.1M parameters", "no published run like it"),
        ({"shape": replace(SEVEN_B, seq_len=131_072)}, "a context of 131,072", "no published run like it"),
        ({"ds": {**STAGE_3, "zero_optimization": {"stage": 1}}}, "ZeRO stage 1", "14 published runs like it"),
        ({"ds": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}}, "fp16", "no published run like it"),
        (
            {"ds": {**STAGE_3, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
            "offload",
            "no published run like it",
        ),
        ({"gpu": "h100-80gb", "gpus": 1024}, "1,024 GPUs", "5 published runs like it"),
        (
            {"shape": replace(SEVEN_B, norm="rmsnorm")},
            "blocks unlike GPT-3's",
            "10 published runs like it reached 0.81",
        ),
        ({"shape": replace(SEVEN_B, sliding_window=512)}, "attention with a mask", "no published run like it"),
        ({"micro": 1}, "micro-batches of 2,048 tokens", "no published run like it"),
        ({"optimizer": MUON}, "muon", "no published run like it"),
        (
            {"ds": {**STAGE_3, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}},
            "hpZ",
            "no published run like it",
        ),
        ({"network": "ethernet-25g"}, "ethernet-25g where theirs is roce-200g", "no published run like it"),
        (
            {"gpu": "h100-80gb", "network": "ib-200g"},
            "ib-200g where theirs is ib-400g",
            "no published run like it",
        ),
    ],
)
def test_whatever_no_row_has_is_an_extrapolation(step_of, changes: dict, beyond: str, seen: str) -> None:
    found = estimate(step_of, **{"shape": SEVEN_B, "gpus": 64, "micro": 2, **changes})
    assert found.beyond == (beyond,)
    assert found.rests_on.startswith("extrapolated beyond the ")
    assert found.error.startswith(seen)
    assert found.calibration == f"{found.rests_on}: {beyond}; {found.error}"


def test_a_network_within_one_node_is_of_no_interest(step_of) -> None:
    assert estimate(step_of, SEVEN_B, gpus=8, network="ethernet-1g").beyond == ()


def test_slower_networks_tell_of_those_who_have_one(step_of) -> None:
    llama = replace(SEVEN_B, norm="rmsnorm")
    assert estimate(step_of, llama, gpus=64, network="roce-100g").error.startswith("26 published runs like it")


def test_a_gpu_without_rows_is_beyond_its_neighbours(step_of) -> None:
    shape = replace(SEVEN_B, norm="rmsnorm")
    found = estimate(step_of, shape, gpus=8, gpu="h200")
    assert found.beyond == ("h200", "blocks unlike GPT-3's")
    assert found.rests_on == "not calibrated, with the H100's efficiency"
    # Those of its own kind, and those of Llama's blocks on an A100 or H100.
    assert found.error.startswith("12 published runs like it")
    assert estimate(step_of, shape, gpus=8, gpu="b200").error == "no published run like it is known"


def test_of_larger_runs_with_other_blocks_larger_ones_tell(step_of) -> None:
    llama = replace(SEVEN_B, norm="rmsnorm")
    assert estimate(step_of, llama, gpus=992).error.startswith("5 published runs like it reached 0.48")
    assert estimate(step_of, llama, gpus=992, micro=1).error.startswith("8 published runs like it reached 0.35")
    stage_1 = {**STAGE_3, "zero_optimization": {"stage": 1}}
    assert estimate(step_of, llama, gpus=992, micro=1, ds=stage_1).error == "no published run like it is known"


def test_what_is_said_of_published_runs_is_what_the_table_gives(step_of) -> None:
    seen: dict[tuple[str, ...], list[float]] = {}
    for run in published_runs():
        kinds = run.beyond_kinds(step_of) if run.is_expressible else ()
        if kinds and (run.counts or ("larger" in kinds and run.tells_of_larger)):
            seen.setdefault(kinds, []).append(run.over_estimate(step_of))
    assert SEEN_BEYOND.keys() == seen.keys()
    for kinds, rates in seen.items():
        assert SEEN_BEYOND[kinds] == pytest.approx(sorted(rates), abs=0.0101), kinds


def test_the_ranges_are_those_of_the_rows() -> None:
    rows = read_rows("llm_foundry_rows.csv")
    for fitted in FITTED:
        mine = [row for row in rows if row["gpu"] in fitted.gpu_names]
        gpus, lengths = [int(row["gpus"]) for row in mine], [int(row["seq_len"]) for row in mine]
        sizes = [GPTShape(*MPT[row["model"]], 50368, 2048).num_parameters for row in mine]
        assert fitted.gpus == (min(gpus), max(gpus))
        assert fitted.seq_len == (min(lengths), max(lengths))
        assert min(int(row["micro_batch_size"]) * int(row["seq_len"]) for row in mine) >= SMALLEST_MICRO_BATCH_TOKENS
        assert fitted.parameters == (pytest.approx(min(sizes), rel=0.1), pytest.approx(max(sizes), rel=0.1))
