from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmscale.architecture.families.family import HFTensor
from llmscale.checkpoint import hf_write
from llmscale.checkpoint.hf_write import check_hf_folder, plan_files, write_file, write_index
from llmscale.errors import ConfigError, MachineError


@pytest.mark.parametrize("checkpoint", ["run/checkpoints/step-00000003", "copied/step-00000003"])
def test_nothing_is_written_where_checkpoints_lie(checkpoint: str, tmp_path: Path) -> None:
    folder = tmp_path / checkpoint
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, folder / "hf", tmp_path / "link" / "hf", tmp_path / "none" / ".." / checkpoint / "hf"):
        with pytest.raises(ConfigError, match="where only training writes"):
            check_hf_folder(out, folder, overwrite=True)
    check_hf_folder(tmp_path / "run" / "hf", folder, overwrite=False)


def test_an_empty_folder_is_as_good_as_none_and_a_stranger_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_hf_folder(out, tmp_path / "checkpoint", overwrite=False)
    (out / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a model that no export wrote"):
        check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)
    (out / "README.md").write_text("---\ntags:\n- llmscale\n---\n")
    check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)
    with pytest.raises(ConfigError, match="exists already"):
        check_hf_folder(out, tmp_path / "checkpoint", overwrite=False)
    for name in ("generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.json"):
        (out / name).write_text("")
    check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)
    (out / "pytorch_model.bin").write_text("")
    with pytest.raises(ConfigError, match=r"holds 'pytorch_model.bin', which no export wrote"):
        check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)


def test_links_that_lead_to_each_other_and_the_current_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="is a symbolic link to nothing"):
        check_hf_folder(tmp_path / "loop", tmp_path / "checkpoint", overwrite=True)
    with pytest.raises(ConfigError, match="loop is a symbolic link to nothing; name a folder"):
        check_hf_folder(tmp_path / "loop" / "out", tmp_path / "checkpoint", overwrite=True)
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for out in (Path("."), Path("..")):
        with pytest.raises(ConfigError, match=r"where only training writes|the folder that this runs in|holds 'below'"):
            check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)


TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TENSORS = [HFTensor("b", "b", (7,)), HFTensor("a", "a", (3, 5)), HFTensor("c.é", "c", (2, 2, 2))]


def parts_of(tensor: HFTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(tensor.name))).to(dtype).flatten()
    yield from values.split(4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_safetensors_reads_what_was_written(dtype, tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    done: list[int] = []
    for path in paths:
        write_file(path, TENSORS, dtype, lambda tensor: parts_of(tensor, TORCH_DTYPES[dtype]), done.append)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sum(done) == 2 * paths[0].stat().st_size
    with safe_open(paths[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {"a", "b", "c.é"}
        for tensor in TENSORS:
            expected = torch.cat(list(parts_of(tensor, TORCH_DTYPES[dtype]))).view(tensor.shape)
            assert torch.equal(file.get_tensor(tensor.name), expected)
    assert int.from_bytes(paths[0].read_bytes()[:8], "little") % 8 == 0


def test_files_hold_as_much_as_they_may_and_at_least_a_tensor(tmp_path: Path) -> None:
    def names(limit: int) -> dict[str, list[str]]:
        return {file: [tensor.name for tensor in group] for file, group in plan_files(TENSORS, "fp32", limit).items()}

    assert names(10**9) == {"model.safetensors": ["b", "a", "c.é"]}
    assert names(120) == {"model.safetensors": ["b", "a", "c.é"]}
    assert names(119) == {
        "model-00001-of-00002.safetensors": ["b", "a"],
        "model-00002-of-00002.safetensors": ["c.é"],
    }
    assert list(names(1).values()) == [["b"], ["a"], ["c.é"]]
    write_index(tmp_path, plan_files(TENSORS, "bf16", 50), "bf16")
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_parameters": 30, "total_size": 60},
        "weight_map": {
            "b": "model-00001-of-00002.safetensors",
            "a": "model-00001-of-00002.safetensors",
            "c.é": "model-00002-of-00002.safetensors",
        },
    }


def test_a_disk_that_returns_other_bytes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_file = hf_write.hash_file

    def flips(path: Path, algorithm: str) -> str:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return hash_file(path, algorithm)

    monkeypatch.setattr(hf_write, "hash_file", flips)
    with pytest.raises(MachineError, match="was read back with another content than was written"):
        write_file(tmp_path / "x", TENSORS, "fp32", lambda tensor: parts_of(tensor, torch.float32), lambda done: None)
