"""What a folder of published weights may hold, and what is said of one that may not be used."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from llmscale.checkpoint.hf_read import find_weights_files, list_safetensors
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
    ("weight_map", "said"),
    [
        ({"x": "../a.safetensors"}, r"'../a.safetensors', the file of 'x', is not a .safetensors file of this folder"),
        ({"x": "/etc/passwd"}, "is not a .safetensors file of this folder"),
        ({"x": "a.bin"}, "is not a .safetensors file of this folder"),
        ({"x": 7}, "is not a .safetensors file of this folder"),
        ({"x": "gone.safetensors"}, r"gone.safetensors is missing, and the index beside it names it"),
        ({"y": "a.safetensors"}, "the index says that a.safetensors holds 'y', and it does not"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_names_files_of_its_folder_that_hold_what_it_says(
    tmp_path: Path, weight_map: object, said: str
) -> None:
    write_file(tmp_path / "a.safetensors", {"x": ("F32", [2])})
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=said):
        list_all(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_file(tmp_path / f"{name}.safetensors", {"x": ("F32", [2]), name: ("F32", [2])})
    write_index(tmp_path, {"x": "a.safetensors", "a": "a.safetensors", "b": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"b.safetensors holds 'x', which a.safetensors holds too"):
        list_all(tmp_path)


def test_damaged_and_hostile_headers_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / SINGLE, {"x": ("F32", [4]), "y": ("F32", [4])})
    whole = path.read_bytes()
    overlapping = {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    huge = {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}
    contents = {
        "truncated": whole[:-1],
        "longer": whole + b"\0",
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
    with pytest.raises(CheckpointError, match=r"holds no weights. Legal: model.safetensors or pytorch_model.bin"):
        find_weights_files(tmp_path)
