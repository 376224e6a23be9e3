"""What the throughput model says of itself: within the rows it was fitted to, and beside runs that it was not."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import build_batch_plan
from llmscale.config.hardware import get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.planning.calibration import FITTED
from llmscale.planning.throughput import Throughput, estimate_throughput
from tests.planning.test_throughput import MPT

SEVEN_B = GPTShape(32, 32, 4096, 50368, 2048)
STAGE_3: dict[str, object] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


@dataclass(frozen=True)
class PublishedRun:
    """ZeRO-3 of 2021, fp16, full recomputation, contexts of 2,048, on A100 80 GB with 8 x 200 Gbit/s per node."""

    n_layer: int
    n_head: int
    n_embd: int
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    tflops_per_gpu: float
    """Hardware FLOPs by the paper's formula (3), recomputation included."""


#: Narayanan et al. 2021 (SC '21, arXiv 2104.04473), table 2, "ZeRO-3 without Model Parallelism"; vocabulary 51,200.
#: None of it was used for the fit. OPT-175B (Zhang et al. 2022) reached 147 TFLOP/s per GPU on 992 A100s, with tensor
#: parallelism beside FSDP.
PUBLISHED = (
    PublishedRun(96, 96, 12288, 384, 4, 1536, 144),
    PublishedRun(96, 96, 12288, 768, 2, 1536, 88),
    PublishedRun(96, 96, 12288, 1536, 1, 1536, 44),
    PublishedRun(105, 128, 20480, 640, 4, 2560, 138),
    PublishedRun(105, 128, 20480, 1120, 2, 2240, 98),
    PublishedRun(105, 128, 20480, 2240, 1, 2240, 48),
)


def estimate(
    layout_of, shape: GPTShape, *, gpus: int, gpu: str = "a100-80gb", ds: dict | None = None, micro: int = 4
) -> Throughput:
    plan = build_batch_plan(
        global_batch_size=8 * micro * gpus, ranks=ParallelLayout(gpus), seq_len=shape.seq_len, micro_batch_size=micro
    )
    layout = layout_of(ds or STAGE_3, shape, plan)
    network = get_interconnect("ib-200g")
    found = estimate_throughput(
        shape, plan, layout, "full", get_gpu(gpu), gpus_per_node=min(8, gpus), interconnect=network
    )
    assert found is not None
    return found


def test_a_run_within_the_rows_is_calibrated_and_says_their_range_and_error(layout_of) -> None:
    found = estimate(layout_of, SEVEN_B, gpus=64)
    assert found.beyond == ()
    assert found.calibration.startswith(
        "calibrated: A100 rows of llm-foundry (8-128 GPUs, 125M-70B parameters, contexts of 512-65,536"
    )
    assert "3 % in the median, 8 %" in found.calibration


@pytest.mark.parametrize(
    ("changes", "beyond"),
    [
        ({"gpus": 992}, "992 GPUs"),
        ({"gpus": 1}, "1 GPU"),
        ({"shape": GPTShape(96, 96, 12288, 50368, 2048)}, "175B parameters"),
        ({"shape": GPTShape(4, 4, 128, 257, 2048)}, "1.1M parameters"),
        ({"shape": replace(SEVEN_B, seq_len=131_072)}, "a context of 131,072"),
        ({"ds": {**STAGE_3, "zero_optimization": {"stage": 1}}}, "ZeRO stage 1"),
        ({"ds": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}}, "fp16"),
        ({"ds": {**STAGE_3, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}}, "offload"),
        ({"gpu": "h100-80gb", "gpus": 1024}, "1,024 GPUs"),
        ({"shape": replace(SEVEN_B, norm="rmsnorm")}, "blocks unlike GPT-3's"),
        ({"shape": replace(SEVEN_B, sliding_window=512)}, "attention with a mask"),
    ],
)
def test_whatever_no_row_has_is_an_extrapolation(layout_of, changes: dict, beyond: str) -> None:
    found = estimate(layout_of, **{"shape": SEVEN_B, "gpus": 64, "micro": 1, **changes})
    assert found.beyond == (beyond,)
    assert found.calibration.startswith("extrapolated beyond the ")
    is_larger = any(word in beyond for word in ("992", "1,024", "175B"))
    assert ("1.2 to 3.8 times slower" in found.calibration) == is_larger


def test_a_card_without_rows_is_beyond_them_by_itself(layout_of) -> None:
    found = estimate(layout_of, SEVEN_B, gpus=8, gpu="h200")
    assert found.beyond == ("h200",)
    assert found.calibration == "not calibrated: assumes H100's efficiency"


def test_the_ranges_are_those_of_the_rows() -> None:
    lines = (Path(__file__).parent / "llm_foundry_rows.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    for fitted in FITTED:
        mine = [row for row in rows if row["gpu"] in fitted.gpu_names]
        gpus, lengths = [int(row["gpus"]) for row in mine], [int(row["seq_len"]) for row in mine]
        sizes = [GPTShape(*MPT[row["model"]], 50368, 2048).num_parameters for row in mine]
        assert fitted.gpus == (min(gpus), max(gpus))
        assert fitted.seq_len == (min(lengths), max(lengths))
        assert fitted.parameters == (pytest.approx(min(sizes), rel=0.1), pytest.approx(max(sizes), rel=0.1))


def too_fast(layout_of, run: PublishedRun) -> float:
    """Estimated over published FLOP/s, by the paper's formula (3)."""
    shape = GPTShape(run.n_layer, run.n_head, run.n_embd, 51_200, 2048)
    plan = build_batch_plan(
        global_batch_size=run.global_batch_size,
        ranks=ParallelLayout(run.gpus),
        seq_len=2048,
        micro_batch_size=run.micro_batch_size,
    )
    ds = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    layout = layout_of(ds, shape, plan)
    network = get_interconnect("ib-200g")
    found = estimate_throughput(
        shape, plan, layout, "full", get_gpu("a100-80gb"), gpus_per_node=8, interconnect=network
    )
    assert found is not None and found.calibration.startswith("extrapolated")
    layers, width = run.n_layer, run.n_embd
    per_token = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51_200 / (16 * layers * width))
    return found.tokens_per_second / run.gpus * per_token / 1e12 / run.tflops_per_gpu


def test_runs_beyond_the_rows_were_slower_by_as_much_as_is_said(layout_of) -> None:
    """Not a success of the model: how far an extrapolation was from six runs that it was not fitted to."""
    errors = [too_fast(layout_of, run) for run in PUBLISHED]
    assert min(errors) == pytest.approx(1.6, abs=0.1)
    assert max(errors) == pytest.approx(3.8, abs=0.1)
