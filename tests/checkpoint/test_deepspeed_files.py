"""Files of DeepSpeed's releases are read by name, run nothing, and are refused in one line where something is amiss."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmscale.checkpoint.deepspeed_files import open_deepspeed_checkpoint
from llmscale.checkpoint.deepspeed_pickles import tag_folder
from llmscale.checkpoint.portable import PortableCheckpoint
from llmscale.errors import CheckpointError
from tests.deepspeed_releases import CELLS, GROUPS, RELEASES, TAG, unpack_release


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("releases")
    return {release: unpack_release(release, out) for release in RELEASES}


@pytest.fixture
def copy(releases: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """`copy(cell)`: the folder of the tag of a checkpoint of the newest release, for a test to change."""

    def make(cell: str) -> Path:
        shutil.copytree(releases[RELEASES[-1]] / cell, tmp_path / cell)
        return tmp_path / cell / TAG

    return make


def open_cell(folder: Path) -> PortableCheckpoint:
    return open_deepspeed_checkpoint(folder / TAG, GROUPS)


def read(checkpoint: PortableCheckpoint, key: str) -> torch.Tensor:
    return checkpoint.tensors[key].read([-1])


def refusal(place: Path, **arguments: Any) -> str:
    """Return why a folder is refused, in one line."""
    with pytest.raises(CheckpointError) as error:
        open_deepspeed_checkpoint(place, **arguments)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the contents of a file of torch.save."""
    contents = torch.load(path, weights_only=False)
    edit(contents)
    torch.save(contents, path)


@pytest.mark.parametrize("release", RELEASES)
def test_every_stage_of_a_release_holds_the_same_under_the_same_names(releases: dict[str, Path], release: str) -> None:
    checkpoints = {cell: open_cell(releases[release] / cell) for cell in CELLS}
    reference = checkpoints["zero0-fp32"]
    for cell, checkpoint in checkpoints.items():
        assert (checkpoint.zero_stage, checkpoint.precision) == (int(cell[4]), cell.split("-")[1])
        assert (checkpoint.step, checkpoint.ranks, checkpoint.samples_per_step) == (3, 2, 6)
        assert checkpoint.tensors.keys() == reference.tensors.keys()
        assert checkpoint.tied == {"head.weight": "embedding.weight"}
        assert checkpoint.lost == ()
        assert checkpoint.client_state.keys() == {"mine", "tensor"}
        assert [group.names for group in checkpoint.groups] == [*GROUPS]
        assert [group.numbers for group in checkpoint.groups] == [{"step": 3.0}] * 3
        assert [group.settings["weight_decay"] for group in checkpoint.groups] == [0.1, 0.0, 0.01]
        if cell.endswith("fp32"):
            for key in reference.tensors:
                torch.testing.assert_close(read(checkpoint, key), read(reference, key), rtol=1e-4, atol=1e-6)
        if cell.endswith("fp16"):
            assert checkpoint.scaler_state is not None
            assert checkpoint.scaler_state["cur_iter"] == 3


def test_a_part_of_a_tensor_is_read_alone(releases: dict[str, Path]) -> None:
    for cell in ("zero2-fp32", "zero3-fp32"):
        tensor = open_cell(releases["0.16.9"] / cell).tensors["master/embedding.weight"]
        whole = tensor.read([-1])
        for start, length in ((0, 1), (60, 20), (137, 1), (5, 0)):
            part = torch.full((length,), torch.nan)
            tensor.fill(part, start)
            assert torch.equal(part, whole[start : start + length])


def test_a_file_of_before_torch_1_6_is_read_too(copy: Callable[[str], Path]) -> None:
    place = copy("zero2-fp32")
    before = open_deepspeed_checkpoint(place)
    expected = {key: tensor.read([-1]) for key, tensor in before.tensors.items()}
    for path in place.glob("*.pt"):
        contents = torch.load(path, weights_only=False)
        torch.save(contents, path, _use_new_zipfile_serialization=False)
    after = open_deepspeed_checkpoint(place)
    assert all(torch.equal(read(after, key), tensor) for key, tensor in expected.items())


def as_compiled(model: dict[str, Any]) -> None:
    """Give the parameters the names that they have in a module that torch.compile wraps."""

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {f"_orig_mod.{name}": value for name, value in values.items()}

    for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
        if model[key] is not None:
            model[key] = renamed(model[key])
    if model["param_shapes"] is not None:
        model["param_shapes"] = [renamed(shapes) for shapes in model["param_shapes"]]
    if model["shared_params"] is not None:
        model["shared_params"] = {
            f"_orig_mod.{alias}": f"_orig_mod.{name}" for alias, name in model["shared_params"].items()
        }
    model["buffer_names"] = [f"_orig_mod.{name}" for name in model["buffer_names"]]


@pytest.mark.parametrize("cell", ["zero0-fp32", "zero2-fp32", "zero3-fp32"])
def test_names_of_compiled_modules_do_not_matter(copy: Callable[[str], Path], cell: str) -> None:
    place = copy(cell)
    before = open_deepspeed_checkpoint(place, GROUPS)
    for path in place.glob("*model_states.pt"):
        change(path, as_compiled)
    after = open_deepspeed_checkpoint(place, GROUPS).with_plain_names()
    assert after.tensors.keys() == before.tensors.keys()
    assert [group.names for group in after.groups] == [*GROUPS]
    assert (after.tied, after.shapes) == (before.tied, before.shapes)


class _Hostile:
    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.system, ("touch hostile",)


class _Mine:
    """A class of the user's."""


def test_a_hostile_pickle_is_refused_and_not_run(
    copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = copy("zero3-fp32")
    path = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    change(path, lambda contents: contents.update(more=_Hostile()))
    assert "holds posix.system, which would run code" in refusal(place)
    path.write_bytes(pickle.dumps(_Hostile()))
    refusal(place)
    assert not (tmp_path / "hostile").exists()


def test_a_class_of_ones_own_is_loaded_where_it_is_allowed(copy: Callable[[str], Path]) -> None:
    place = copy("zero2-fp32")
    change(place / "mp_rank_00_model_states.pt", lambda contents: contents.update(args=_Mine()))
    assert "allow=[_Mine]" in refusal(place)
    assert isinstance(open_deepspeed_checkpoint(place, allow=[_Mine]).client_state["args"], _Mine)


def test_files_of_ranks_that_are_missing_are_counted(copy: Callable[[str], Path]) -> None:
    place = copy("zero3-fp32")
    (place / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "1 of the 2 files *_optim_states.pt that 2 ranks saved" in refusal(place)
    (place / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "0 of the 2 files *_optim_states.pt" in refusal(place)
    (place / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "1 of the 2 files *_model_states.pt" in refusal(place)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 no archive either", b"\x80\x02K\x01."])
def test_foreign_and_truncated_files_are_refused(copy: Callable[[str], Path], content: bytes) -> None:
    place = copy("zero2-fp32")
    path = place / "mp_rank_00_model_states.pt"
    whole = path.read_bytes()
    path.write_bytes(content)
    assert str(path) in refusal(place)
    path.write_bytes(whole[: len(whole) // 2])
    assert str(path) in refusal(place)


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model.pop("module"),
        lambda model: model.update(param_shapes=[{"up.weight": 7}]),
        lambda model: model.update(dp_world_size="two"),
        lambda model: model.update(global_steps=None),
        lambda model: model["param_shapes"].pop(),
        lambda model: model["param_shapes"][0].update({"up.weight": torch.Size([10**9, 10**9])}),
    ],
)
def test_contents_of_another_kind_are_refused(
    copy: Callable[[str], Path], edit: Callable[[dict[str, Any]], object]
) -> None:
    place = copy("zero2-fp32")
    change(place / "mp_rank_00_model_states.pt", edit)
    assert str(place) in refusal(place)


def test_a_tensor_of_fewer_bytes_than_it_claims_is_refused(copy: Callable[[str], Path]) -> None:
    place = copy("zero2-fp32")

    def inflate(model: dict[str, Any]) -> None:
        model["module"]["mask"] = torch.zeros(1).expand(10**6, 10**6)

    change(place / "mp_rank_00_model_states.pt", inflate)
    assert "fewer stored bytes" in refusal(place)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallelism"),
        ("layer_01-model_00-model_states.pt", "tensor or pipeline parallelism"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "two runs"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "two runs of different precisions"),
        ("offloaded_tensors", "NVMe"),
    ],
)
def test_other_ways_to_divide_a_model_are_refused(copy: Callable[[str], Path], name: str, why: str) -> None:
    place = copy("zero2-fp32")
    (place / name).write_bytes(b"")
    assert why in refusal(place)


def test_pieces_that_other_ranks_hold_again_are_refused(copy: Callable[[str], Path]) -> None:
    """MiCS divides states over some ranks alone."""
    place = copy("zero3-fp32")
    for rank in (0, 1):
        path = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        change(
            path, lambda contents: contents["optimizer_state_dict"]["fp32_flat_groups"].__setitem__(0, torch.ones(9))
        )
    assert "MiCS" in refusal(place)


def test_stage_0_needs_the_names_of_its_groups(releases: dict[str, Path]) -> None:
    place = releases["0.19.8"] / "zero0-fp32" / TAG
    assert "stores the optimizer without names" in refusal(place)
    assert "optimizer groups of [4, 3, 1] parameters, and this engine of [8]" in refusal(
        place, names=[[name for group in GROUPS for name in group]]
    )
    assert "other optimizer groups" in refusal(place, names=[(*GROUPS[0][2:], *GROUPS[0][:2]), *GROUPS[1:]])


def test_more_files_than_ranks_are_of_an_earlier_save(copy: Callable[[str], Path]) -> None:
    place = copy("zero2-fp32")
    path = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(path, place / "zero_pp_rank_7_mp_rank_00_optim_states.pt")
    assert open_deepspeed_checkpoint(place).ranks == 2


def test_a_tag_is_a_name(releases: dict[str, Path], tmp_path: Path) -> None:
    folder = releases["0.19.8"] / "zero2-fp32"
    assert tag_folder(folder) == folder / TAG
    assert tag_folder(folder / TAG) == folder / TAG
    assert tag_folder(tmp_path) is None
    for tag in ("../../etc", "..", ""):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match="does not name a folder"):
            tag_folder(tmp_path)
