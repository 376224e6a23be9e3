"""A finished checkpoint is recognised, and so is every kind of damage."""

from __future__ import annotations

import re
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


def cut(contents: bytes) -> bytes:
    return contents[:-3]


def flip(contents: bytes) -> bytes:
    middle = len(contents) // 2
    return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_0.distcp", cut, "__0_0.distcp .*cut short"),
        *((name, flip, f"{name} does not match its hash") for name in ("__0_0.distcp", "state.json", "tensors.json")),
        ("manifest.json", lambda contents: contents[:50], "manifest.json is not JSON"),
        (
            "manifest.json",
            lambda contents: contents.replace(b'"step": 7', b'"step": 8'),
            "does not match its hash",
        ),
    ],
)
def test_damage_is_found(checkpoint: Path, name: str, damage: Callable[[bytes], bytes], words: str) -> None:
    (checkpoint / name).write_bytes(damage((checkpoint / name).read_bytes()))
    assert re.search(words, str(find_damage(checkpoint)))


def test_a_missing_file_is_found(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()
    assert "state.json cannot be read: No such file" in str(find_damage(checkpoint))


def test_a_folder_without_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        load_manifest(checkpoint)


def test_ranks_share_the_hashing(checkpoint: Path) -> None:
    (checkpoint / "tensors.json").unlink()
    findings = [find_damage(checkpoint, part, 3) for part in range(3)]
    assert sum(finding is not None for finding in findings) == 1
