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
import torch.distributed.checkpoint as dcp

from llmscale.checkpoint.fragments import Fragment, FragmentLoadPlanner
from llmscale.checkpoint.json_storage import JsonIndexReader
from llmscale.checkpoint.load import find_newest_good, load_full_weights
from llmscale.checkpoint.manifest import list_checkpoints
from llmscale.errors import CheckpointError


@pytest.fixture
def checkpoint(save_steps: Callable, tmp_path: Path) -> Path:
    save_steps(3)
    return list_checkpoints(tmp_path / "run")[0]


def _load(folder: Path, fragments: dict[str, Fragment]) -> None:
    dcp.load(fragments, storage_reader=JsonIndexReader(folder), planner=FragmentLoadPlanner())


def test_any_cut_of_a_tensor_can_be_loaded(checkpoint: Path) -> None:
    for start, length in [(0, 10), (990, 10), (123, 456), (1000, 0)]:
        fragment = Fragment(torch.empty(length), start, 1000)
        _load(checkpoint, {"master/w": fragment})
        assert torch.equal(fragment.local, torch.arange(start, start + length, dtype=torch.float32) + 3)


def test_loads_into_another_precision(checkpoint: Path) -> None:
    fragment = Fragment(torch.empty(4, dtype=torch.bfloat16), 0, 1000)
    _load(checkpoint, {"master/w": fragment})
    assert fragment.local.tolist() == [3, 4, 5, 6]


def test_a_tensor_that_is_not_stored_is_named(checkpoint: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="the checkpoint has no 'master/other'"):
        _load(checkpoint, {"master/other": Fragment(torch.empty(4), 0, 4)})


def test_a_model_of_another_shape_is_refused(checkpoint: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="1000 elements in the checkpoint and 64 in the model"):
        _load(checkpoint, {"master/w": Fragment(torch.empty(64), 0, 64)})


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
    (checkpoint / "evil.distcp").write_bytes(archive)
    index = json.loads((checkpoint / "tensors.json").read_text())
    for entry in index.values():
        entry["chunks"] = [[0, 1000, "evil.distcp", 0, len(archive)]]
    (checkpoint / "tensors.json").write_text(json.dumps(index))
    with pytest.raises(dcp.CheckpointException, match="Weights only load failed"):
        load_full_weights(checkpoint)
    assert not evidence.exists()
    torch.load(io.BytesIO(archive), weights_only=False)
    assert evidence.exists(), "the archive was harmless, and this test could not fail"


def _malicious_archive(evidence: Path) -> bytes:
    """A torch archive whose pickle is ours."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Malice(evidence), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def test_the_newest_good_checkpoint_is_taken(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(1, 2, 3)
    newest, middle, oldest = list_checkpoints(tmp_path / "run")
    (newest / "__0_0.distcp").write_bytes(b"torn")
    (middle / "manifest.json").unlink()
    lines: list[str] = []
    assert find_newest_good(tmp_path / "run", dist.group.WORLD, lines.append) == oldest
    assert len(lines) == 2
    assert lines[0].startswith("WARNING: step-00000003 is damaged and passed over: ")
    assert "has 4 bytes instead of" in lines[0]
    assert "manifest.json is missing" in lines[1]


def test_a_run_without_a_good_checkpoint_does_not_begin_anew(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is whole"):
        find_newest_good(tmp_path / "run", dist.group.WORLD, lambda _: None)


def test_a_run_without_checkpoints_begins(one_rank: None, tmp_path: Path) -> None:
    assert find_newest_good(tmp_path / "run", dist.group.WORLD, lambda _: None) is None
