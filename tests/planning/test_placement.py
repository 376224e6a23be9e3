from __future__ import annotations

import re

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.errors import ConfigError
from llmscale.planning.placement import GPUPlacement, GPUs, place, usual_mfu

SMALL = GPTShape(12, 12, 768, 50257, 1024)
LARGE = GPTShape(40, 40, 5120, 50257, 2048)


def gpus(name: str = "a100-80gb", *, per_node: int = 8, num_nodes: int | None = 1, mfu: float | None = None) -> GPUs:
    return GPUs(get_gpu(name), per_node, num_nodes, get_interconnect("ib-200g"), mfu)


def put(shape: GPTShape, machines: GPUs, batch: int = 512, *, is_batch_given: bool = False) -> GPUPlacement:
    return place(shape, batch, is_batch_given=is_batch_given, gpus=machines)


def test_the_row_is_the_one_that_estimate_recommends() -> None:
    found = put(SMALL, gpus())
    assert found.row is not None and found.row.fit.fits and found.row.throughput is not None
    assert found.mfu == found.row.throughput.mfu
    assert found.calibration == found.row.throughput.calibration
    assert "A100 rows of llm-foundry" in found.calibration
    speed = found.tokens_per_second(SMALL, get_gpu("a100-80gb"))
    assert speed == pytest.approx(found.row.throughput.tokens_per_second)


def test_a_given_mfu_wins_over_the_estimate() -> None:
    found = put(SMALL, gpus(mfu=0.25))
    assert (found.mfu, found.calibration) == (0.25, "given by --mfu")


def test_a_batch_nobody_gave_is_rounded_up_to_the_gpus() -> None:
    assert put(SMALL, gpus(per_node=6), batch=512).global_batch_size == 516


def test_a_given_batch_is_not_changed_but_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size 512 cannot be divided over 6 ranks"):
        put(SMALL, gpus(per_node=6), batch=512, is_batch_given=True)


def test_without_a_number_of_nodes_as_few_as_hold_the_model() -> None:
    assert put(SMALL, gpus(num_nodes=None)).machines.num_nodes == 1
    found = put(LARGE, gpus("a100-40gb", per_node=1, num_nodes=None))
    assert found.machines.num_nodes > 1
    # On half of them only offload would do.
    half = put(LARGE, gpus("a100-40gb", per_node=1, num_nodes=found.machines.num_nodes // 2))
    assert half.row is None or half.row.fit.strategy.offload != "-"


def test_what_fits_in_no_way_says_what_is_missing_and_what_helps() -> None:
    giant = GPTShape(96, 96, 12288, 50257, 8192)
    found = put(giant, gpus("t4", per_node=8), batch=1600)
    assert found.row is None and found.mfu is None
    assert re.search(r"needs [\d.]+ GiB more per GPU. More GPUs alone do not help; a shorter --seq-len", found.why)
    assert found.tokens_per_second(giant, get_gpu("t4")) is None


def test_a_card_without_bf16_runs_fp16() -> None:
    found = put(SMALL, gpus("t4"))
    assert found.row is not None and found.row.fit.step.precision == "fp16"


def test_the_usual_mfu_is_that_of_the_arithmetic() -> None:
    found = put(SMALL, gpus())
    assert found.mfu is not None
    assert found.mfu <= usual_mfu(SMALL, gpus()) * 1.0001
    assert usual_mfu(SMALL, gpus(mfu=0.3)) == 0.3
