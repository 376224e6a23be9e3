"""Buffers, frozen parameters, decay groups and every moment survive any change of stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("world_size", "loads"),
    [(3, "sample"), pytest.param(3, "all", marks=pytest.mark.slow), pytest.param(2, "all", marks=pytest.mark.slow)],
)
def test_every_tensor_survives_a_change_of_stage(ranks: Callable, tmp_path: Path, world_size: int, loads: str) -> None:
    job = ranks([str(Path(__file__).parent / "zero_state_job.py"), str(tmp_path), loads], world_size)
    output = job.wait()[0]
    assert job.exit_codes == [0] * world_size, output
    assert output.count("ok ") == 11
