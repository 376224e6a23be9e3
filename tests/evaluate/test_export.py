from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.errors import ConfigError, DataError, MachineError
from llmscale.evaluate.export import export_model
from llmscale.evaluate.load_model import TrainedModel
from llmscale.model.gpt import GPT

pytest.importorskip("transformers")


@pytest.fixture
def trained() -> TrainedModel:
    return TrainedModel(GPT(GPTShape(1, 2, 16, 257, 8), seed=0).eval(), ByteTokenizer(), step=1)


def test_every_weight_is_in_the_file(trained: TrainedModel, tmp_path: Path) -> None:
    num_weights = export_model(trained, tmp_path / "out", "fp32", overwrite=False)
    assert num_weights == trained.model.shape.num_parameters - (384 - 257) * 16
    assert (tmp_path / "out/model.safetensors").stat().st_size > 4 * num_weights


def test_weights_that_fp16_cannot_hold_are_refused(trained: TrainedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        trained.model.blocks[0].mlp.up.weight[3, 4] = -7e4
    with pytest.raises(ConfigError, match=r"fp16 cannot hold the 70000 in 'transformer.h.0.mlp.c_fc.weight'"):
        export_model(trained, tmp_path / "out", "fp16", overwrite=False)
    assert not list(tmp_path.iterdir())
    export_model(trained, tmp_path / "out", "bf16", overwrite=False)


def test_nothing_is_left_of_a_write_that_fails_midway(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier export stays."""
    import safetensors.torch

    out = tmp_path / "out"
    export_model(trained, out, "fp32", overwrite=False)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fails(state: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: the disk is gone")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(DataError, match=f"Cannot write {out}: I/O error: the disk is gone"):
        export_model(trained, out, "bf16", overwrite=True)
    assert list(tmp_path.iterdir()) == [out]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_disk_that_returns_other_bytes_is_noticed(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    save_file = safetensors.torch.save_file

    def flips(state: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(state, path, metadata)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(safetensors.torch, "save_file", flips)
    with pytest.raises(MachineError, match="was read back with another 'transformer"):
        export_model(trained, tmp_path / "out", "fp32", overwrite=False)
    assert not list(tmp_path.iterdir())


def test_what_appeared_meanwhile_is_not_replaced(trained: TrainedModel, tmp_path: Path) -> None:
    """Between the check of the folder and the end of the export; an empty folder is no loss."""
    (tmp_path / "out").mkdir()
    export_model(trained, tmp_path / "out", "fp32", overwrite=False)
    with pytest.raises(DataError, match="Cannot write"):
        export_model(trained, tmp_path / "out", "fp32", overwrite=False)


def test_weights_that_diverged_are_refused_whatever_the_dtype(trained: TrainedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        trained.model.blocks[0].mlp.up.weight[3, 4] = torch.nan
    with pytest.raises(ConfigError, match=r"'transformer.h.0.mlp.c_fc.weight' holds NaN"):
        export_model(trained, tmp_path / "out", "fp32", overwrite=False)
    assert not (tmp_path / "out").exists()


def test_who_may_read_one_file_may_read_all(trained: TrainedModel, tmp_path: Path) -> None:
    export_model(trained, tmp_path / "out", "bf16", overwrite=False)
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
