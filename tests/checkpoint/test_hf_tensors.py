"""Any range of elements of our parameters, read from files of transformers."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmscale.architecture.families.family import HFTensor
from llmscale.checkpoint import hf_read
from llmscale.checkpoint.hf_read import TensorSlice, fill_view, find_weights_files, list_tensors
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError

#: (how the files have our rows 0 to 6 of [7, 5], how many rows of padding ours has behind them)
LAYOUTS: dict[str, list[HFTensor]] = {
    "whole": [HFTensor("a", "p", (7, 5))],
    "stacked": [HFTensor("a", "p", (3, 5)), HFTensor("b", "p", (4, 5), first_row=3)],
    "transposed": [HFTensor("a", "p", (5, 7), transposed=True)],
    "skipped": [HFTensor("a", "p", (9, 5), skipped_rows=2)],
    "vector": [HFTensor("a", "p", (15,)), HFTensor("b", "p", (20,), first_row=15)],
}


def save(folder: Path, layout: list[HFTensor], values: torch.Tensor, kind: str) -> list[TensorSlice]:
    """Our [7, 5] values as the files of a layout."""
    tensors: dict[str, torch.Tensor] = {}
    for tensor in layout:
        if len(tensor.shape) == 1:
            tensors[tensor.name] = values.flatten()[tensor.first_row : tensor.first_row + tensor.shape[0]].clone()
            continue
        rows = tensor.shape[1] if tensor.transposed else tensor.shape[0] - tensor.skipped_rows
        part = values[tensor.first_row : tensor.first_row + rows]
        whole = torch.cat([torch.full((tensor.skipped_rows, 5), 99.0, dtype=values.dtype), part])
        tensors[tensor.name] = (whole.t() if tensor.transposed else whole).contiguous()
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    stored = list_tensors(find_weights_files(folder))
    return [TensorSlice(tensor, stored[tensor.name]) for tensor in layout]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_range_of_elements_is_theirs_and_padding_is_zero(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_read, "_CHUNK", 11)
    values = torch.arange(35.0).view(7, 5) + 1
    pieces = save(tmp_path, LAYOUTS[name], values.bfloat16(), kind)
    total = 35 if name == "vector" else 50
    ours = torch.cat([values.flatten(), torch.zeros(total - 35)])
    for start in range(total):
        for stop in range(start, total + 1, 3):
            local = torch.full((stop - start,), 7.0)
            fill_view(ShardView(local, start, total), pieces)
            assert torch.equal(local, ours[start:stop]), (start, stop)


def test_rows_that_ours_lacks_are_left_out(tmp_path: Path) -> None:
    values = torch.arange(35.0).view(7, 5)
    pieces = save(tmp_path, LAYOUTS["skipped"], values, "safetensors")
    local = torch.empty(15)
    fill_view(ShardView(local, 0, 15), pieces)
    assert torch.equal(local, values[:3].flatten())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, value: float) -> None:
    values = torch.ones(7, 5)
    values[3, 3] = value
    pieces = save(tmp_path, LAYOUTS["whole"], values, "safetensors")
    fill_view(ShardView(torch.empty(18), 0, 35), pieces)
    with pytest.raises(CheckpointError, match=r"model.safetensors: 'a' holds values that are not finite numbers"):
        fill_view(ShardView(torch.empty(1), 18, 35), pieces)


def test_a_file_that_is_gone_by_then_is_one_line(tmp_path: Path) -> None:
    pieces = save(tmp_path, LAYOUTS["whole"], torch.ones(7, 5), "safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="'a' cannot be read"):
        fill_view(ShardView(torch.empty(35), 0, 35), pieces)


class _Hostile:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.made,)


def test_a_pickle_is_read_for_tensors_and_its_code_never_run(tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": _Hostile(made)}, file)
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        list_tensors(find_weights_files(tmp_path))
    file.write_bytes(pickle.dumps({"a": _Hostile(made)}))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        list_tensors(find_weights_files(tmp_path))
    assert not made.exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], {"a": 3}, {"a": torch.ones(2, 2).to_sparse()}])
def test_a_pickle_of_anything_but_tensors_by_name_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"is not a table of tensors|cannot be read"):
        list_tensors(find_weights_files(tmp_path))


def test_an_old_pickle_says_how_to_convert_it(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="Save it as safetensors"):
        list_tensors(find_weights_files(tmp_path))
