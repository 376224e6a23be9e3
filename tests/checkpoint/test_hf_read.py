"""What a folder of published weights may hold, and what is said of one that may not be used."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmscale.architecture.families.family import HFTensor
from llmscale.architecture.hf_config import FAMILIES
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint import hf_read
from llmscale.checkpoint.hf_read import (
    StoredTensor,
    TensorSlice,
    fill_view,
    find_weights_files,
    has_unused_head,
    list_safetensors,
    list_tensors,
    match_tensors,
)
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError
from tests.safetensors_files import write_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def list_all(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (t.shape, t.dtype) for name, t in list_safetensors(find_weights_files(folder)).items()}


def test_one_file_or_shards_give_names_shapes_and_types(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"x": ("BF16", [2, 3])})
    write_file(tmp_path / "b.safetensors", {"y": ("F32", [4])})
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    assert list_all(tmp_path) == {"x": ((2, 3), "BF16"), "y": ((4,), "F32")}
    write_file(tmp_path / SINGLE, {"z": ("F16", [1])})
    assert list_all(tmp_path) == {"z": ((1,), "F16")}


def test_the_files_of_the_hubs_cache_are_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_file(tmp_path / "blobs" / "123", {"x": ("F32", [2])})
    (tmp_path / "snapshot" / SINGLE).symlink_to("../blobs/123")
    assert list_all(tmp_path / "snapshot") == {"x": ((2,), "F32")}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "../a.safetensors"}, r"'../a.safetensors', the file of 'x', is not a .safetensors file of this folder"),
        ({"x": "/etc/passwd"}, "is not a .safetensors file of this folder"),
        ({"x": 7}, "is not a .safetensors file of this folder"),
        ({"x": "gone.safetensors"}, r"gone.safetensors is missing, and the index beside it names it"),
        ({"y": "a.safetensors"}, "the index says that a.safetensors holds 'y', and it does not"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_names_files_of_its_folder_that_hold_what_it_says(
    tmp_path: Path, weight_map: object, message: str
) -> None:
    write_file(tmp_path / "a.safetensors", {"x": ("F32", [2])})
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        list_all(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_file(tmp_path / f"{name}.safetensors", {"x": ("F32", [2]), name: ("F32", [2])})
    write_index(tmp_path, {"x": "a.safetensors", "a": "a.safetensors", "b": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"b.safetensors holds 'x', which a.safetensors holds too"):
        list_all(tmp_path)


def test_damaged_and_hostile_headers_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / SINGLE, {"x": ("F32", [4]), "y": ("F32", [4])})
    complete = path.read_bytes()
    overlapping = {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    huge = {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}
    contents = {
        "truncated": complete[:-1],
        "longer": complete + b"\0",
        "empty": b"",
        "no header": struct.pack("<Q", 2**60) + b"{}",
        "a header behind the end": struct.pack("<Q", 90 * 2**20) + b"{}",
        "no JSON": struct.pack("<Q", 3) + b"[[[",
        "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
        "overlapping": write_file(path, {"x": ("F32", [4]), "y": ("F32", [4])}, y=overlapping).read_bytes(),
        "huge": write_file(path, {"x": ("F32", [4])}, x=huge).read_bytes(),
    }
    for name, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a complete safetensors file") as caught:
            list_all(tmp_path)
        assert len(str(caught.value).splitlines()) == 1, name


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="is a named pipe, not a regular file"):
        find_weights_files(tmp_path)


def test_a_folder_without_weights_says_what_they_are_called(tmp_path: Path) -> None:
    write_file(tmp_path / "consolidated.safetensors", {"x": ("F32", [4])})
    with pytest.raises(
        CheckpointError,
        match=r"holds no weights, but consolidated.safetensors. Legal: model.safetensors or pytorch_model.bin",
    ):
        find_weights_files(tmp_path)


SHAPE = GPTShape(n_layer=1, n_head=2, n_embd=8, vocab_size=20, seq_len=16)
WANTED = tuple(FAMILIES["gpt2"].tensors(SHAPE))


def stored_tensors(dtype: str = "F32") -> dict[str, StoredTensor]:
    return {t.name: StoredTensor(t.name, Path("model.safetensors"), t.shape, dtype) for t in WANTED}


def test_every_parameter_is_found_with_and_without_the_models_prefix() -> None:
    stored = stored_tensors()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    for given in (stored, bare):
        assert match_tensors(given, WANTED, "hf:x").keys() == {tensor.name for tensor in SHAPE.tensors.all}


def test_what_older_files_have_besides_is_left_out() -> None:
    extra = {"transformer.h.0.attn.bias": (1, 1, 16, 16), "h.0.attn.masked_bias": (), "lm_head.weight": (20, 8)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = (2,)
    more = {name: StoredTensor(name, Path("f"), shape, "F32") for name, shape in extra.items()}
    pieces = match_tensors({**stored_tensors(), **more}, WANTED, "hf:x")
    assert has_unused_head({**stored_tensors(), **more}, pieces)
    assert not has_unused_head(stored_tensors(), pieces)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F64", "torch.quint8"])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(CheckpointError, match=rf"has the type {dtype}. Legal: F32, F16, BF16"):
        match_tensors(stored_tensors(dtype), WANTED, "hf:x")


def test_missing_surplus_and_other_shapes_are_named() -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    stored = stored_tensors()
    less = {key: value for key, value in stored.items() if key != name}
    more = {**stored, "score.weight": stored[name], "a.weight": stored[name]}
    other = {**stored, name: StoredTensor(name, Path("f"), (32, 8), "F32")}
    wrapped = {f"module._orig_mod.{key}": value for key, value in stored.items()}
    for given, message in (
        (less, rf"hf:x lacks '{name}', compared with its config.json \({len(less)} tensors\)"),
        (wrapped, "a wrapper such as torch.compile's, .* was saved in place of the model"),
        (more, "hf:x holds 'a.weight' and 1 more, .* the model has no place for it"),
        (other, rf"hf:x: '{name}' has the shape \[32, 8\], and \[8, 32\] by its config.json"),
    ):
        with pytest.raises(CheckpointError, match=message):
            match_tensors(given, WANTED, "hf:x")


@pytest.mark.parametrize(
    ("architecture", "lacks", "holds", "message"),
    [
        ("LlamaForCausalLM", ["lm_head.weight"], [], r'whose config.json lacks "tie_word_embeddings": true'),
        (
            "LlamaModel",
            ["lm_head.weight"],
            [],
            "lacks 'lm_head.weight', .* the class LlamaModel is the decoder without a head. .* the whole",
        ),
        ("LlamaModel", ["model.norm.weight"], [], r"hf:x lacks 'norm\.weight', "),
        (
            "LlamaForSequenceClassification",
            ["lm_head.weight"],
            ["score.weight"],
            "lacks 'lm_head.weight' and holds 'score.weight', .* LlamaForSequenceClassification is not a causal",
        ),
        ("LlamaForTokenClassification", [], ["score.weight"], "holds 'score.weight', .* not a causal language model"),
        ("LlamaForCausalLM", [], ["a", "b"], "holds 'a' and 1 more, .* the model has no place"),
    ],
)
def test_another_class_of_the_family_is_named(
    architecture: str, lacks: list[str], holds: list[str], message: str
) -> None:
    untied = SHAPE.changed({"positions": "rotary", "norm": "rmsnorm", "gated_mlp": True, "tied": False, "bias": False})
    wanted = tuple(FAMILIES["llama"].tensors(untied))
    is_bare = architecture == "LlamaModel"
    stored = {t.name: StoredTensor(t.name, Path("f"), t.shape, "F32") for t in wanted if t.name not in lacks}
    stored |= {name: StoredTensor(name, Path("f"), (2, 8), "F32") for name in holds}
    stored = {name.removeprefix("model.") if is_bare else name: tensor for name, tensor in stored.items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        match_tensors(stored, wanted, "hf:x", architecture)
    assert ("tie_word_embeddings" in str(caught.value)) == (architecture == "LlamaForCausalLM" and bool(lacks))


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
        values_ = torch.cat([torch.full((tensor.skipped_rows, 5), 99.0, dtype=values.dtype), part])
        tensors[tensor.name] = (values_.t() if tensor.transposed else values_).contiguous()
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


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'6' * 64}\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: is a Git LFS pointer, .*git lfs pull"):
        find_weights_files(tmp_path)
