"""A finished checkpoint is recognised, and so is every kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import find_damage, load_manifest
from llmscale.errors import CheckpointError


@pytest.fixture
def checkpoint(save_steps: Callable, tmp_path: Path) -> Path:
    save_steps(7)
    return list_checkpoints(tmp_path / "run")[0]


def test_says_what_the_checkpoint_is(checkpoint: Path, tmp_path: Path) -> None:
    manifest = load_manifest(checkpoint)
    assert (manifest.step, manifest.tokens_seen, manifest.world_size, manifest.zero_stage) == (7, 1792, 1, 2)
    assert {file.name for file in manifest.files} == {"__0_0.distcp", "state.json", "tensors.json"}
    assert manifest.num_bytes == sum(path.stat().st_size for path in checkpoint.iterdir()) - (
        (checkpoint / "manifest.json").stat().st_size
    )
    assert find_damage(checkpoint) is None
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step-00000007"


def test_finds_a_truncated_file(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-3])
    assert "__0_0.distcp" in str(find_damage(checkpoint))
    assert "cut short" in str(find_damage(checkpoint))


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", "tensors.json"])
def test_finds_a_flipped_bit(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert name in str(find_damage(checkpoint))
    assert "does not match its hash" in str(find_damage(checkpoint))


def test_finds_a_missing_file(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()
    assert "state.json cannot be read: No such file" in str(find_damage(checkpoint))


def test_finds_a_changed_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    stored = json.loads(path.read_text())
    stored["manifest"]["step"] = 8
    path.write_text(json.dumps(stored))
    assert "does not match its hash" in str(find_damage(checkpoint))


def test_finds_a_torn_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text()[:50])
    assert "manifest.json is not JSON" in str(find_damage(checkpoint))


def test_a_folder_without_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        load_manifest(checkpoint)


def test_ranks_share_the_hashing(checkpoint: Path) -> None:
    (checkpoint / "tensors.json").unlink()
    findings = [find_damage(checkpoint, part, 3) for part in range(3)]
    assert sum(finding is not None for finding in findings) == 1


def test_partial_folders_are_not_listed(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.with_name(".step-00000009.partial").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000007"]
