"""A released engine leaves no tensor behind, and the process group to the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import run_cells

CPU = {"device": "cpu"}
BF16, AUTOCAST = {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}


def engine(stage: int, *, optimizer: str = "adamw", precision: dict | None = None, **zero: object) -> list[object]:
    return [{"zero_optimization": {"stage": stage, **zero}, **(precision or {})}, optimizer]


ENGINES = [engine(0), engine(1, precision=BF16), engine(3, offload_optimizer=CPU, offload_param=CPU)]
MORE_ENGINES = [
    *(engine(stage) for stage in (1, 2, 3)),
    engine(2, offload_optimizer=CPU),
    *(engine(stage, precision=BF16) for stage in (0, 2, 3)),
    *(engine(stage, optimizer="muon", precision=AUTOCAST) for stage in range(4)),
    engine(3, precision=BF16, stage3_param_persistence_threshold=0),
]


JOB = Path(__file__).with_name("release_job.py")


@pytest.mark.parametrize(
    ("engines", "world_size"),
    [
        (ENGINES, 2),
        pytest.param(MORE_ENGINES, 2, marks=pytest.mark.slow),
        pytest.param(ENGINES + MORE_ENGINES, 1, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_and_the_next_engine_trains_as_the_first(engines: list[list[object]], world_size: int) -> None:
    for wanted, actual in zip(engines, run_cells(JOB, engines, world_size), strict=True):
        assert actual["left_bytes"] == [0] * world_size, (wanted, actual["left"])
        first, second = actual["losses"]
        assert first == second, wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_memory_is_given_back() -> None:
    for wanted, actual in zip(ENGINES, run_cells(JOB, ENGINES, 1), strict=True):
        assert actual["left_bytes"] == [0], (wanted, actual["left"])
        # Libraries' own work space, such as cuBLAS's, is made once.
        assert actual["gpu_bytes"] < 64 * 2**20, wanted
