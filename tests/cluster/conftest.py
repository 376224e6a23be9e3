"""Real hosts for tests: see scripts/playground/hosts.py. Skipped, with the reason, where they cannot be made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.playground.hosts import Playground, why_impossible

if TYPE_CHECKING:
    from tests.cluster.lab import Lab

REPOSITORY = Path(__file__).resolve().parents[2]
#: What a user's shell on a host would have set.
SHELL = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(REPOSITORY),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def make_playground(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Playground]]:
    """`make_playground(3)`: three running hosts that see pytest's temporary folders; removed when the test ends."""
    reason = why_impossible()
    if reason:
        pytest.skip(reason)
    made: list[Playground] = []

    def make(num_hosts: int) -> Playground:
        folder = tmp_path / f"playground-{len(made)}"
        playground = Playground(num_hosts, folder, shared=[tmp_path_factory.getbasetemp()])
        made.append(playground)
        return playground.__enter__()

    yield make
    for playground in made:
        playground.down()


@pytest.fixture
def make_lab(make_playground: Callable[..., Playground], tiny_set: Path, tmp_path: Path) -> Callable[..., Lab]:
    """`make_lab(2)`: two hosts ready for `llmscale launch`."""
    from tests.cluster.lab import Lab

    def make(num_hosts: int) -> Lab:
        return Lab(make_playground(num_hosts), tmp_path, tiny_set)

    return make
