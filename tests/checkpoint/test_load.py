"""Loading reads the numbers, runs nothing, and passes over what is damaged."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmscale.checkpoint.inventory import find_checkpoints, list_checkpoints, record_history
from llmscale.checkpoint.load import (
    check_nothing_is_dropped,
    check_same_scalars,
)
from llmscale.checkpoint.manifest import Checkpoint, History
from llmscale.checkpoint.store import CheckpointStore
from llmscale.checkpoint.tensor_files import Fragment, fill_fragments, load_index
from llmscale.engine.collectives import Disks
from llmscale.errors import CheckpointError
from tests.checkpoint.written import load_full_weights

ONE_DISK = Disks((0,))


@pytest.fixture
def checkpoint(save_steps: Callable, tmp_path: Path) -> Path:
    save_steps(3)
    return list_checkpoints(tmp_path / "run")[0]


def test_any_cut_of_a_tensor_can_be_loaded(checkpoint: Path) -> None:
    for start, length in [(0, 10), (990, 10), (123, 456), (1000, 0)]:
        fragment = Fragment(torch.empty(length), start, 1000)
        fill_fragments(checkpoint, load_index(checkpoint), {"master/w": fragment})
        assert torch.equal(fragment.local, torch.arange(start, start + length, dtype=torch.float32) + 3)


def test_loads_into_another_precision(checkpoint: Path) -> None:
    fragment = Fragment(torch.empty(4, dtype=torch.bfloat16), 0, 1000)
    fill_fragments(checkpoint, load_index(checkpoint), {"master/w": fragment})
    assert fragment.local.tolist() == [3, 4, 5, 6]


def test_a_tensor_that_is_not_stored_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint has no 'master/other'"):
        fill_fragments(checkpoint, load_index(checkpoint), {"master/other": Fragment(torch.empty(4), 0, 4)})


def test_a_model_of_another_shape_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="1000 elements in the checkpoint and 64 in the model"):
        fill_fragments(checkpoint, load_index(checkpoint), {"master/w": Fragment(torch.empty(64), 0, 64)})


def test_what_nobody_asked_for_is_refused() -> None:
    with pytest.raises(CheckpointError, match="holds 'exp_avg/x' and 1 more, which this run has no place for"):
        check_nothing_is_dropped(["master/x", "exp_avg/x", "exp_avg/y"], ["master/x"], Path("step-1"))
    check_nothing_is_dropped(["master/x"], ["master/x", "buffer/y"], Path("step-1"))


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({"decay": {"step": 3.0, "beta": 1.0}}, "'decay.beta' is stored and this run has no place for it"),
        ({"decay": {}}, "'decay.step' is not stored"),
        ({"other": {"step": 3.0}}, "'decay.step' is not stored"),
        ({"decay": {"step": float("nan")}}, "nan is not a finite number"),
    ],
)
def test_the_optimizers_numbers_are_those_of_this_run(stored: dict, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        check_same_scalars(stored, {"decay": {"step": 0.0}}, Path("step-1"))
    check_same_scalars({"decay": {"step": 7}}, {"decay": {"step": 0.0}}, Path("step-1"))


@pytest.mark.parametrize("text", ["[]", "7", '{"master/w": 3}', '{"master/w": {}}', "[" * 5000, "\udcff"])
def test_an_index_of_another_shape_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / "tensors.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"tensors\.json"):
        load_index(checkpoint)


class _Malice:
    """Unpickling it makes a folder."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.evidence),)


def test_nothing_in_a_checkpoint_is_executed(checkpoint: Path, tmp_path: Path) -> None:
    """A pickle where DCP keeps its index, and one inside the file of tensors."""
    evidence = tmp_path / "executed"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Malice(evidence)))
    load_full_weights(checkpoint)
    assert not evidence.exists()
    archive = _malicious_archive(evidence)
    (checkpoint / "__9_0.distcp").write_bytes(archive)
    index = json.loads((checkpoint / "tensors.json").read_text())
    index["master/w"]["chunks"] = [[0, 1000, "__9_0.distcp", 0, len(archive)]]
    (checkpoint / "tensors.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"__9_0\.distcp, 'w', does not hold a flat tensor"):
        load_full_weights(checkpoint)
    assert not evidence.exists()
    torch.load(io.BytesIO(archive), weights_only=False)
    assert evidence.exists(), "the archive was harmless, and this test could not fail"


def _malicious_archive(evidence: Path) -> bytes:
    """A torch archive whose pickle is ours."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Malice(evidence), protocol=2))
        archive.writestr("archive/data/0", bytes(4000))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def newest_good(run: Path, report: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    return CheckpointStore(run, dist.group.WORLD, ONE_DISK, report).newest_whole(find_checkpoints(run))


def test_the_newest_good_checkpoint_is_taken(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(1, 2, 3)
    newest, middle, oldest = list_checkpoints(tmp_path / "run")
    (newest / "__0_0.distcp").write_bytes(b"torn")
    (middle / "manifest.json").unlink()
    lines: list[str] = []
    checkpoint = newest_good(tmp_path / "run", lines.append)
    assert checkpoint is not None and checkpoint.path == oldest
    assert len(lines) == 2
    assert lines[0].startswith("WARNING: step-00000002 is damaged and passed over: ")
    assert "manifest.json is missing" in lines[0]
    assert lines[1].startswith("WARNING: step-00000003 is damaged and passed over: ")
    assert "has 4 bytes instead of" in lines[1]


def test_a_run_without_a_good_checkpoint_does_not_begin_anew(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is intact"):
        newest_good(tmp_path / "run")


def test_a_run_without_checkpoints_begins(one_rank: None, tmp_path: Path) -> None:
    assert newest_good(tmp_path / "run") is None


def test_a_run_of_which_only_abandoned_checkpoints_are_left_does_not_begin_anew(
    checkpoint: Path, tmp_path: Path
) -> None:
    record_history(tmp_path / "run", History(2), tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere has no checkpoints. 1 abandoned ones can be taken"):
        newest_good(tmp_path / "run")


def test_a_run_whose_only_checkpoint_has_another_name_does_not_begin_anew(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.rename(checkpoint.with_name("step-00000003-backup"))
    lines: list[str] = []
    with pytest.raises(CheckpointError, match=r"nothing to continue from but step-00000003-backup"):
        newest_good(tmp_path / "run", lines.append)
    assert len(lines) == 1
