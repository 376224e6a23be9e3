"""What was converted holds the same numbers, and DeepSpeed's layouts come back from any ranks and stage."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmscale.checkpoint.convert import import_deepspeed, open_portable
from llmscale.checkpoint.deepspeed_files import open_deepspeed_checkpoint
from llmscale.checkpoint.deepspeed_write import write_native, write_universal
from llmscale.checkpoint.module_weights import read_weights
from llmscale.checkpoint.portable import PortableCheckpoint
from llmscale.cli.main import main
from llmscale.errors import CheckpointError
from tests.deepspeed_releases import GROUPS, TAG, unpack_release


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_release("0.19.8", tmp_path_factory.mktemp("release"))


def open_cell(release: Path, cell: str) -> PortableCheckpoint:
    return open_deepspeed_checkpoint(release / cell / TAG, GROUPS)


def assert_same(one: PortableCheckpoint, other: PortableCheckpoint) -> None:
    """Both continue alike: bits of every tensor, groups, schedule, counters and the loop's own values."""
    assert one.tensors.keys() == other.tensors.keys()
    for key, tensor in one.tensors.items():
        assert torch.equal(tensor.read([-1]), other.tensors[key].read([-1])), key
    assert [group.names for group in one.groups] == [group.names for group in other.groups]
    assert [group.numbers for group in one.groups] == [group.numbers for group in other.groups]
    assert [group.settings for group in one.groups] == [group.settings for group in other.groups]
    for name in ("step", "precision", "tied", "scheduler", "skipped_steps", "global_samples", "has_frozen"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.client_state["mine"] == other.client_state["mine"] == [1, 2]


@pytest.mark.parametrize("cell", ["zero0-fp32", "zero2-fp32", "zero3-fp32", "zero1-bf16", "zero2-fp16"])
def test_what_was_resharded_is_the_same(release: Path, tmp_path: Path, cell: str) -> None:
    source = open_cell(release, cell)
    for stage, ranks in itertools.product((0, 1, 2, 3), (1, 3, 5)):
        if cell.endswith("fp16") and stage == 0:
            continue
        place = write_native(source, tmp_path / f"{stage}-{ranks}", ranks=ranks, stage=stage)
        written = open_deepspeed_checkpoint(place, GROUPS)
        assert (written.zero_stage, written.ranks) == (stage, ranks)
        assert_same(source, written)
        assert written.scaler_state == source.scaler_state or not cell.endswith("fp16")
        assert (place.parent / "latest").read_text() == place.name


def test_sub_groups_follow_the_ds_config(release: Path, tmp_path: Path) -> None:
    source = open_cell(release, "zero2-fp32")
    source.ds_config["zero_optimization"]["sub_group_size"] = 30
    place = write_native(source, tmp_path, ranks=2, stage=3)
    model = torch.load(place / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=True)
    assert [[*shapes] for shapes in model["param_shapes"]] == [
        ["up.weight"],
        ["up.bias", "down.weight"],
        ["down.bias"],
        [*GROUPS[1]],
        [*GROUPS[2]],
    ]
    assert_same(source, open_deepspeed_checkpoint(place))


def test_a_universal_folder_is_the_same(release: Path, tmp_path: Path) -> None:
    source = open_cell(release, "zero3-fp32")
    assert_same(source, open_deepspeed_checkpoint(write_universal(source, tmp_path)))


@pytest.mark.parametrize("cell", ["zero2-fp32", "zero3-bf16"])
def test_what_was_imported_is_the_same(release: Path, tmp_path: Path, cell: str) -> None:
    imported = import_deepspeed(release / cell, tmp_path / "run")
    assert imported.left_out == ("tensor",)
    source = open_cell(release, cell)
    assert_same(source, open_portable(tmp_path / "run"))
    weights = read_weights(tmp_path / "run")
    assert weights["head.weight"] is weights["embedding.weight"]
    for _, name, tensor in source.parts("master", "frozen", "buffer"):
        assert torch.equal(weights[name].view(-1), tensor.read([-1]))


def test_the_commands_convert(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(release / "zero3-fp32")
    run, weights, out, universal = (str(tmp_path / name) for name in ("run", "weights", "out", "universal"))
    assert main(["checkpoint", "import", source, "--to", run]) == 0
    assert main(["checkpoint", "verify", run]) == 0
    assert main(["checkpoint", "export", run, "--as", "safetensors", "--to", weights]) == 0
    assert main(["checkpoint", "export", source, "--as", "universal", "--to", universal]) == 0
    assert main(["checkpoint", "reshard", run, "--ranks", "3", "--stage", "2", "--to", out]) == 0
    printed = capsys.readouterr().out
    assert "Left out of client_state, as they are not plain values: tensor." in printed
    stored = load_file(Path(weights) / "model.safetensors")
    expected = open_cell(release, "zero3-fp32")
    assert stored.keys() == {name for _, name, _ in expected.parts("master", "frozen", "buffer")}
    assert_same(expected, open_portable(Path(out)))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("reshard {cell} --ranks 0 --stage 2 --to {out}", "--ranks 0: must be from 1"),
        ("reshard {cell} --ranks 2 --stage 4 --to {out}", "--stage 4: must be one of 0, 1, 2, 3"),
        ("reshard {out} --ranks 2 --stage 1 --to {out}", "is not a checkpoint"),
        ("export {cell} --as universal --dtype bf16 --to {out}", "--dtype has no effect"),
        ("import {cell} --tag best --to {out}", "no *_model_states.pt"),
        ("import {out} --to {out}", "has no file 'latest'"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_a_line(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, why: str
) -> None:
    text = words.format(cell=release / "zero2-fp32", out=tmp_path / "out")
    assert main(["checkpoint", *text.split()]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(release: Path, tmp_path: Path) -> None:
    source = open_cell(release, "zero2-fp32")
    write_native(source, tmp_path, ranks=2, stage=1)
    with pytest.raises(CheckpointError, match="exists"):
        write_native(source, tmp_path, ranks=3, stage=1)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", ""])
def test_names_lead_nowhere_else(release: Path, tmp_path: Path, name: str) -> None:
    source = open_cell(release, "zero2-fp32")
    tensors = {**source.tensors, f"master/{name}": source.tensors["master/gain"]}
    hostile = replace(source, tensors=tensors, shapes={**source.shapes, name: [1]})
    with pytest.raises(CheckpointError, match="does not name a parameter"):
        write_universal(hostile, tmp_path / "a" / "b")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(release: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Not a directory"):
        write_universal(open_cell(release, "zero2-fp32"), tmp_path / "file" / "out")


def test_orders_that_depend_on_ranks_are_not_written(release: Path, tmp_path: Path) -> None:
    source = open_cell(release, "zero2-fp32")
    source.ds_config["zero_optimization"]["round_robin_gradients"] = True
    with pytest.raises(CheckpointError, match="round_robin_gradients"):
        write_native(source, tmp_path, ranks=2, stage=2)
    assert write_native(source, tmp_path, ranks=2, stage=3).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["zero2-fp32", "zero3-fp32"])
def test_safetensors_are_what_zero_to_fp32_gives(release: Path, tmp_path: Path, cell: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    expected = get_fp32_state_dict_from_zero_checkpoint(str(release / cell))
    assert (
        main(["checkpoint", "export", str(release / cell), "--as", "safetensors", "--to", str(tmp_path / "out")]) == 0
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {*expected} - {*stored} == {"head.weight"}
    assert all(torch.equal(stored[name].float(), expected[name].float()) for name in stored if name in expected)
