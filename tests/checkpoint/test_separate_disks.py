"""Nodes without a shared disk: each has its own run folder, and they exchange messages only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import find_checkpoints
from llmscale.checkpoint.manifest import checkpoints_folder, find_damage, load_manifest, load_pieces
from tests.conftest import TRAIN, Ranks, assert_same_losses, build_train_command, read_losses, start_ranks

RANK = Path(__file__).parent.parent / "distributed" / "store_rank.py"
#: 8 steps in fp32, saving every second.
FLAGS = ("--precision", "fp32", "--steps", "8", "--save-every", "2", "--keep-last", "9", "--lr", "3e-3")


class Nodes:
    """Nodes whose run folders are FOLDER/node-0/run, FOLDER/node-1/run and so on."""

    def __init__(self, start: Callable[..., Ranks], data: Path, folder: Path) -> None:
        self._start, self._data, self.folder = start, data, folder

    def run(self, node: int) -> Path:
        return self.folder / f"node-{node}" / "run"

    def train(self, layout: list[int], *flags: str, expect: int = 0) -> list[str]:
        """Train with so many ranks on each node; return the ranks' outputs."""
        for node in range(len(layout)):
            self.run(node).parent.mkdir(parents=True, exist_ok=True)
        os.environ["NODE_FOLDER"] = str(self.folder / "node-{node}")
        words = build_train_command(self._data, Path("run"), *FLAGS, *flags)
        assert words[0] == str(TRAIN)
        job = self._start([str(RANK), *words[1:]], sum(layout), layout)
        outputs = job.wait()
        assert job.exit_codes == [expect] * sum(layout), "\n".join(outputs)
        return outputs

    def forget_after(self, step: int) -> None:
        """Leave all disks as a crash soon after the save of `step` would have left them."""
        for run in self.folder.glob("node-*/run"):
            checkpoints = find_checkpoints(run)
            for checkpoint in [*checkpoints.current, *checkpoints.abandoned]:
                if checkpoint.step > step:
                    shutil.rmtree(checkpoint.path)


@pytest.fixture(scope="module")
def trained(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once on two nodes of one rank each."""
    nodes = Nodes(start_ranks, tiny_set, tmp_path_factory.mktemp("trained"))
    nodes.train([1, 1], "--ds", "zero2")
    return nodes.folder


@pytest.fixture
def nodes(ranks: Callable[..., Ranks], tiny_set: Path, tmp_path: Path, trained: Path) -> Nodes:
    return Nodes(ranks, tiny_set, Path(shutil.copytree(trained, tmp_path / "nodes")))


@pytest.fixture
def straight(train_straight: Callable[..., dict[int, float]]) -> dict[int, float]:
    return train_straight(*FLAGS)


def test_every_disk_has_its_own_tensors_and_all_descriptions(nodes: Nodes, straight: dict[int, float]) -> None:
    assert_same_losses(read_losses(nodes.run(0)), straight)
    manifests = []
    for node in (0, 1):
        folder = checkpoints_folder(nodes.run(node)) / "step-00000008"
        pieces = load_pieces(folder)
        assert pieces is not None and set(pieces.files) == {"tensors.json", f"__{node}_0.distcp"}
        assert find_damage(folder) is None
        manifests.append(load_manifest(folder))
    assert manifests[0] == manifests[1]
    assert {file.name for file in manifests[0].files} > {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.slow
def test_swapped_nodes_with_another_number_of_ranks_resume_at_another_stage(
    nodes: Nodes, straight: dict[int, float]
) -> None:
    nodes.forget_after(4)
    # Rank 0's own records move with it; its checkpoint is on the other disk.
    for node in (0, 1):
        checkpoints_folder(nodes.run(node)).rename(nodes.folder / str(node))
    for node in (0, 1):
        (nodes.folder / str(node)).rename(checkpoints_folder(nodes.run(1 - node)))
    nodes.train([2, 2], "--ds", "zero3")
    assert_same_losses(read_losses(nodes.run(0)), straight)
    assert [find_damage(checkpoints_folder(nodes.run(node)) / "step-00000008") for node in (0, 1)] == [None, None]
    nodes.forget_after(6)
    nodes.train([1, 1], "--ds", "zero1")
    assert_same_losses(read_losses(nodes.run(0)), straight)
    for node in (0, 1):
        pieces = load_pieces(checkpoints_folder(nodes.run(node)) / "step-00000006")
        assert pieces is not None and len(pieces.files) > 2, "the other disk's tensors came as messages"


def test_a_lost_disk_is_named_and_nothing_begins_anew(nodes: Nodes) -> None:
    shutil.rmtree(nodes.run(1))
    for layout in ([1, 1], [1]):
        output = nodes.train(layout, "--steps", "9", expect=2)[0]
        assert "step-00000008/__1_0.distcp is on no disk of these nodes" in output
    assert len(find_checkpoints(nodes.run(0)).current) == 4


def test_a_lost_disk_costs_only_what_it_alone_had(nodes: Nodes, straight: dict[int, float]) -> None:
    """The newest checkpoint with all of its files on the remaining disks is resumed."""
    folder = checkpoints_folder(nodes.run(0)) / "step-00000004"
    shutil.copy(checkpoints_folder(nodes.run(1)) / "step-00000004" / "__1_0.distcp", folder)
    pieces = (folder / "pieces.json").read_text().replace('"__0_0.distcp"', '"__0_0.distcp", "__1_0.distcp"')
    (folder / "pieces.json").write_text(pieces)
    shutil.rmtree(nodes.run(1))
    output = nodes.train([1, 1], "--ds", "zero2")[0]
    assert "step-00000008 is damaged and passed over" in output
    assert_same_losses(read_losses(nodes.run(0)), straight)


def test_going_back_holds_on_all_disks(nodes: Nodes) -> None:
    back = "run/checkpoints/step-00000004"
    nodes.train([1, 1], "--ds", "zero2", "--steps", "6", "--schedule", "constant", "--resume", back)
    for node in (0, 1):
        checkpoints = find_checkpoints(nodes.run(node))
        assert checkpoints.history.number == 2
        assert [checkpoint.step for checkpoint in checkpoints.current] == [6, 4, 2]
        assert {checkpoint.step for checkpoint in checkpoints.abandoned} == {6, 8}
