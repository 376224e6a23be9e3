from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.checkpoint.frozen_base import FrozenBase, base_of_checkpoint, check_base, checksum_of
from llmscale.checkpoint.manifest import CheckpointManifest
from llmscale.checkpoint.run_state import RunState, SavedRun
from llmscale.errors import CheckpointError


def saved(path: Path, base: dict[str, str]) -> SavedRun:
    manifest = CheckpointManifest(3, 100, 1, 2, "fp32", "2026-01-01T00:00:00+00:00", ())
    return SavedRun(path, manifest, RunState(3, 0, 0, 0, {}, "fp32", {}, base=base))


def test_a_base_is_known_by_every_byte_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(3 << 20))
    base = FrozenBase("hf:there", checksum=checksum_of(FrozenBase("hf:there"), [path]))
    adapters = saved(tmp_path / "step-3", base.as_dict())
    check_base(base, adapters)
    with path.open("r+b") as file:
        file.seek(3 << 19)  # in the middle
        file.write(b"1")
    changed = FrozenBase("hf:there", checksum=checksum_of(base, [path]))
    with pytest.raises(CheckpointError, match=rf"{base.checksum} and is {changed.checksum}"):
        check_base(changed, adapters)


def test_adapters_are_no_base(tmp_path: Path) -> None:
    assert base_of_checkpoint(saved(tmp_path / "model", {})).place == str((tmp_path / "model").resolve())
    with pytest.raises(CheckpointError, match="--merge"):
        base_of_checkpoint(saved(tmp_path / "adapters", {"place": "hf:there", "checksum": "1"}))
