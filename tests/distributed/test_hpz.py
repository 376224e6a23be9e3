"""hpZ: a second copy of the weights within groups of ranks changes what is communicated, and not what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import build_train_command, read_losses, words
from tests.runs_in_turn import train_in_turn

RANKS = 4
FLAGS = words("--precision fp32 --micro-batch-size 1 --save-every 2 --schedule constant --lr 3e-3")


def command(data: Path, run: Path, ds_config: Path, steps: int) -> list[str]:
    """Two micro-steps for each of four ranks: the second one finds the copies that the first one made."""
    return build_train_command(data, run, *FLAGS, "--ds", str(ds_config), "--steps", str(steps))


@pytest.fixture
def in_groups_of(tmp_path: Path) -> Callable[[int], Path]:
    """`in_groups_of(n)`: a ds_config of stage 3 in which nothing stays gathered and groups of n ranks have copies."""

    def write(group: int) -> Path:
        zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        path = tmp_path / f"groups-of-{group}.json"
        path.write_text(json.dumps({"zero_optimization": {**zero, "zero_hpz_partition_size": group}}))
        return path

    return write


@pytest.mark.parametrize("groups", [(2, 2), pytest.param((4, 2, 1), marks=pytest.mark.slow)])
def test_losses_are_those_of_stage_3_also_after_a_resume_in_other_groups(
    groups: tuple[int, ...], in_groups_of: Callable[[int], Path], tiny_set: Path, tmp_path: Path
) -> None:
    plain = command(tiny_set, tmp_path / "plain", in_groups_of(1), 2 * len(groups))
    resumed = [
        command(tiny_set, tmp_path / "hpz", in_groups_of(group), 2 * number) for number, group in enumerate(groups, 1)
    ]
    # DeepSpeed makes a process's groups once.
    for commands in ([plain, resumed[0]], *([command] for command in resumed[1:])):
        train_in_turn(commands, RANKS)
    assert read_losses(tmp_path / "hpz") == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-6)
