"""hpZ: a second copy of the weights within groups of ranks changes what is communicated, and not what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmscale.engine.zero_shards import refresh_low_precision_weights
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


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--freeze blocks.*", "--lora-rank 2"])
def test_frozen_weights_are_those_that_were_loaded(
    flags: str, in_groups_of: Callable[[int], Path], tiny_set: Path, tmp_path: Path
) -> None:
    """zero.Init has made copies of the first ones, which no optimizer step replaces."""
    base = command(tiny_set, tmp_path / "base", in_groups_of(1), 2)
    begin = (*words(flags), "--init-from", str(tmp_path / "base"))
    runs = [[*command(tiny_set, tmp_path / str(group), in_groups_of(group), 2), *begin] for group in (1, 2)]
    train_in_turn([base, *runs], RANKS)
    assert read_losses(tmp_path / "2") == pytest.approx(read_losses(tmp_path / "1"), rel=1e-6)


def test_loaded_weights_replace_the_copies() -> None:
    """Also when a run goes back, where a validation may have made copies since the last step."""
    weights = [SimpleNamespace(ds_secondary_tensor=copy) for copy in ("of trained", "of frozen", None)]
    weights.append(SimpleNamespace())
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(fp32_partitioned_groups_flat=[], persistent_parameters=[]),
        module=SimpleNamespace(parameters=lambda: weights),
    )
    refresh_low_precision_weights(engine)
    assert not any(vars(weight).get("ds_secondary_tensor") for weight in weights)
