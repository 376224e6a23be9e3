"""Training goes on from published weights, at every stage, world size and precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmscale.cli.main import main
from tests.conftest import REPOSITORY, build_train_command, read_losses, run_ranks, words
from tests.hub_server import COMMIT, Hub, serve_model
from tests.published_models import CONFIGS, VOCAB_SIZE, save_model
from tests.runs_in_turn import train_in_turn

JOB = REPOSITORY / "tests" / "distributed" / "published_weights_job.py"
SEQ_LEN = 32
#: A step that changes no weight: each is larger than what 1e-30 could move.
STILL = words("--steps 1 --lr 1e-30 --weight-decay 0 --schedule constant --precision fp32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per family, with what transformers computes beside it."""
    folder = tmp_path_factory.mktemp("models")
    tokens = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(3))
    for name in CONFIGS:
        model = save_model(folder / name, name, shard_size="30KB")
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.save({"tokens": tokens, "loss": loss}, folder / name / "expected.pt")
    return {name: folder / name for name in CONFIGS}


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_every_stage_has_the_bits_of_the_files_and_the_loss_of_transformers(
    models: dict[str, Path], tiny_set: Path, world_size: int
) -> None:
    output = run_ranks([str(JOB), str(tiny_set), *map(str, models.values())], world_size)
    assert output.count("ok ") == 2 * 9 + len(models) - 2, output


@pytest.fixture
def train(tiny_set: Path, tmp_path: Path) -> Callable[..., str]:
    """`train(world_size, *flags, expect=0)`: a run in tmp_path/run of the model that the flags name; its output."""

    def run(world_size: int, *flags: str, expect: int = 0) -> str:
        command = build_train_command(tiny_set, tmp_path / "run", *flags, model=())
        return run_ranks(command, world_size, expect=expect)

    return run


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_run_begins_with_the_weights_and_goes_on_without_the_folder(
    train: Callable[..., str], models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models["gpt2"], tmp_path / "gpt2"))
    flags = ("--ds", "zero3", "--precision", "fp32")
    output = train(2, "--init-from", f"hf:{folder}", *flags, "--steps", "2")
    assert f"weights from hf:{folder}; everything else starts at step 0" in output
    assert "positions 32 to 63 of the weights are left out: samples have 32 tokens" in output
    assert "no tokenizer.json: only sizes were compared, 257 tokens in the dataset, 260 rows in the weights" in output
    assert f"hf:{folder}" in (tmp_path / "run" / "start.txt").read_text()
    shutil.rmtree(folder)
    assert "step 2, 512 tokens seen" in train(1, *flags, "--steps", "3")
    assert "step 3, 768 tokens seen" in train(1, *flags, "--steps", "4", "--model", f"hf:{folder}")
    assert set(read_losses(tmp_path / "run")) == {1, 2, 3, 4}


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_what_is_exported_begins_a_run_that_exports_the_same_bytes(
    train: Callable[..., str], models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = models[name]
    for turn in (1, 2):
        train(1, "--init-from", f"hf:{folder}", *STILL)
        out = tmp_path / f"out-{turn}"
        assert main(["export", str(tmp_path / "run"), "--to", str(out), "--dtype", "fp32"]) == 0
        shutil.rmtree(tmp_path / "run")
        folder = out
    first, second = tmp_path / "out-1", tmp_path / "out-2"
    theirs, ours = load_folder(models[name]), load_folder(first)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key
    for file in [*first.glob("*.safetensors"), first / "config.json", first / "tokenizer.json"]:
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


@pytest.mark.slow
def test_weights_that_are_no_numbers_leave_no_run(
    train: Callable[..., str], models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models["qwen2"], tmp_path / "broken"))
    tensors = load_folder(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tensors["model.norm.weight"][-1] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    output = train(2, "--init-from", f"hf:{folder}", "--ds", "zero3", expect=2)
    assert "'model.norm.weight' holds values that are not finite numbers" in output
    assert not (tmp_path / "run").exists()


def test_a_pickle_is_looked_into_before_the_run_folder_is_made(
    train: Callable[..., str], models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models["opt"], tmp_path / "old"))
    tensors = load_folder(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({name: t for name, t in tensors.items() if "fc1" not in name}, folder / "pytorch_model.bin")
    output = train(1, "--init-from", f"hf:{folder}", expect=2)
    assert "lacks 'model.decoder.layers.0.fc1.weight' and 3 more, " in output
    assert not (tmp_path / "run").exists()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "finished at step 1" in train(2, "--init-from", f"hf:{folder}", "--steps", "1")


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub has own/model, and this machine's cache nothing."""
    served = Path(shutil.copytree(models["qwen3"], tmp_path / "served"))
    for name in ("modeling.py", "consolidated.safetensors", "model.gguf"):
        (served / name).write_text("raise SystemExit")
    with serve_model(served, tmp_path / "home", monkeypatch) as hub:
        yield hub


def test_exactly_what_is_needed_of_a_name_is_fetched_once(
    train: Callable[..., str], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"weights from hf:own/model@{COMMIT}"
    assert message in train(2, "--init-from", "hf:own/model@main", "--steps", "1")
    assert [path for path in hub.asked if path.endswith("/config.json") and path.startswith("/")] == [
        "/own/model/resolve/main/config.json"
    ]
    weights = {path.name for path in hub.files.glob("model*.safetensors*")}
    assert hub.cached == {*weights, "config.json", "generation_config.json"}
    shutil.rmtree(tmp_path / "run")
    asked = len(hub.asked)
    assert message in train(1, "--init-from", "hf:own/model", "--steps", "1")
    assert len(hub.asked) == asked, "everything is in the cache, and that there is no tokenizer is known"
    shutil.rmtree(tmp_path / "home")
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = train(1, "--init-from", "hf:own/model", expect=2)
    assert (
        "hf:own/model is not a file or folder here, is not in the Hugging Face cache, and cannot be fetched" in output
    )
    assert not (tmp_path / "run").exists()


def test_a_dense_model_with_experts_added_begins_with_its_own_loss(
    tiny_set: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    """And is exported in a family with experts, each a copy."""
    begin = ("--init-from", f"hf:{models['qwen3']}", *STILL, "--ds", "zero3")
    cases = {
        "dense": "",
        "experts": "--num-experts 4",
        "sigmoid": "--num-experts 3 --router-score sigmoid --router-bias --dense-layers 1",
        "unnormalised": "--num-experts 4 --no-normalize-router",
    }
    commands = [
        build_train_command(tiny_set, tmp_path / name, *begin, *words(flags), model=()) for name, flags in cases.items()
    ]
    for flags, output in zip(cases.values(), train_in_turn(commands, 2), strict=True):
        assert ("4 experts in 2 of 2 blocks begin as copies of the MLP" in output) == ("4" in flags)
    losses = {name: read_losses(tmp_path / name)[1] for name in cases}
    assert losses["experts"] == pytest.approx(losses["dense"], abs=1e-6)
    assert losses["sigmoid"] == pytest.approx(losses["dense"], abs=1e-6)
    assert abs(losses["unnormalised"] - losses["dense"]) > 1e-4
    assert main(["export", str(tmp_path / "experts"), "--to", str(tmp_path / "out")]) == 0
    theirs, ours = load_folder(models["qwen3"]), load_folder(tmp_path / "out")
    for expert in range(4):
        place = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        assert torch.equal(ours[place], theirs["model.layers.1.mlp.down_proj.weight"])
