"""hpZ: a second copy of the weights within groups of ranks changes what is communicated, and not what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import build_train_command, read_losses, start_ranks

RANKS = 4
FLAGS = (
    *("--precision", "fp32", "--micro-batch-size", "1", "--save-every", "2"),
    *("--schedule", "constant", "--lr", "3e-3"),
)


def train(data: Path, run: Path, ds_config: Path | str, steps: int) -> None:
    """Four ranks, two micro-steps each: the second one finds the copies that the first one made."""
    command = build_train_command(data, run, *FLAGS, "--ds", str(ds_config), "--steps", str(steps))
    job = start_ranks(command, RANKS)
    output = job.wait()[0]
    assert job.exit_codes == [0] * RANKS, output


@pytest.fixture
def in_groups_of(tmp_path: Path) -> Callable[[int], Path]:
    """`in_groups_of(n)`: a ds_config of stage 3 in which nothing stays gathered and groups of n ranks have copies."""

    def write(group: int) -> Path:
        zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        path = tmp_path / f"groups-of-{group}.json"
        path.write_text(json.dumps({"zero_optimization": {**zero, "zero_hpz_partition_size": group}}))
        return path

    return write


def test_losses_are_those_of_stage_3_also_after_a_resume(
    in_groups_of: Callable[[int], Path], tiny_set: Path, tmp_path: Path
) -> None:
    train(tiny_set, tmp_path / "plain", in_groups_of(1), 4)
    train(tiny_set, tmp_path / "hpz", in_groups_of(2), 2)
    train(tiny_set, tmp_path / "hpz", in_groups_of(2), 4)
    assert read_losses(tmp_path / "hpz") == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-6)


@pytest.mark.slow
def test_groups_may_change_at_a_resume(in_groups_of: Callable[[int], Path], tiny_set: Path, tmp_path: Path) -> None:
    train(tiny_set, tmp_path / "plain", in_groups_of(1), 6)
    for step, group in ((2, 4), (4, 2), (6, 1)):
        train(tiny_set, tmp_path / "hpz", in_groups_of(group), step)
    assert read_losses(tmp_path / "hpz") == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-6)
