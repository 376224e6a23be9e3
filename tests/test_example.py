"""The example of a loop of one's own, and that importing its parts costs nothing until they are used."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from llmscale import api
from tests.conftest import REPOSITORY, forget_after, run_ranks

EXAMPLE = str(REPOSITORY / "examples" / "own_loop.py")


def run_example(data: Path, run: Path, stage: int, ranks: int) -> dict[int, float]:
    output = run_ranks([EXAMPLE, str(data), str(run), str(stage)], ranks)
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss ([\d.]+)$", output, re.MULTILINE)}


@pytest.mark.slow
def test_the_example_continues_on_other_ranks_at_another_stage(tiny_set: Path, tmp_path: Path) -> None:
    losses = run_example(tiny_set, tmp_path / "run", 2, 2)
    assert [*losses] == [*range(1, 31)]
    forget_after(tmp_path / "run", 25)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    again = run_example(tiny_set, tmp_path / "other", 3, 1)
    assert [*again] == [*range(26, 31)]
    assert all(abs(loss - losses[step]) < 2e-6 for step, loss in again.items())


@pytest.mark.slow
def test_the_example_continues_on_more_ranks(tiny_set: Path, tmp_path: Path) -> None:
    losses = run_example(tiny_set, tmp_path / "run", 1, 2)
    forget_after(tmp_path / "run", 25)
    again = run_example(tiny_set, tmp_path / "run", 3, 5)
    assert all(abs(loss - losses[step]) < 2e-6 for step, loss in again.items())


def test_every_name_of_the_door_exists() -> None:
    assert all(getattr(api, name) is not None for name in api.__all__)
    assert {*dir(api)} >= {"load_run"}
    with pytest.raises(AttributeError, match="has no attribute 'open_streams'"):
        api.open_streams  # noqa: B018
