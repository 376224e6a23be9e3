"""`--keep-zeros`: a pruned model is trained on, and what is 0 in its blocks' matrices stays 0 at every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmscale.checkpoint.inventory import find_checkpoint
from tests.checkpoint.written import load_full_weights
from tests.conftest import build_train_command, read_losses, run_ranks, words
from tests.published_models import CONFIGS, save_model

#: Of the blocks' four matrices, as GPT-2's files have them.
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
FLAGS = words("--steps 4 --lr 1e-2 --save-every 2 --keep-zeros")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with every second element of its blocks' matrices at 0."""
    folder = tmp_path_factory.mktemp("pruned")
    save_model(folder, "gpt2")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(MATRICES):
            tensor.view(-1)[::2] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(data: Path, run: Path, world_size: int, *flags: str) -> str:
    return run_ranks(build_train_command(data, run, *flags, model=()), world_size)


def zero_share(weights: dict[str, torch.Tensor], part: str = "weight") -> dict[str, float]:
    return {name: float((tensor == 0).float().mean()) for name, tensor in weights.items() if part in name}


@pytest.mark.parametrize(
    ("world_size", "stage", "precision"),
    [
        (2, "zero3", "bf16"),
        pytest.param(1, "zero1", "fp32", marks=pytest.mark.slow),
        pytest.param(2, "zero0", "fp32", marks=pytest.mark.slow),
        pytest.param(2, "zero2", "bf16", marks=pytest.mark.slow),
        pytest.param(2, "zero3_offload", "fp32", marks=pytest.mark.slow),
        pytest.param(2, "zero3_ckpt", "fp32", marks=pytest.mark.slow),
    ],
)
def test_zeros_stay_and_the_rest_is_trained(
    tiny_set: Path, pruned: Path, tmp_path: Path, world_size: int, stage: str, precision: str
) -> None:
    run = tmp_path / "run"
    flags = (*FLAGS, "--ds", stage, "--precision", precision)
    train(tiny_set, run, world_size, *flags, "--init-from", f"hf:{pruned}")
    # And after a resume, which knows of no file of weights.
    train(tiny_set, run, 1, *flags, "--steps", "6", "--ds", "zero2")
    assert sorted(read_losses(run)) == list(range(1, 7))
    trained = load_full_weights(find_checkpoint(run))
    shares = zero_share(trained)
    matrices = [name for name in shares if any(part in name for part in ("attn.qkv", "attn.proj", "mlp."))]
    assert len(matrices) == 8
    assert {shares[name] for name in matrices} == {0.5}
    original = load_file(pruned / "model.safetensors")
    moved = trained[next(name for name in matrices if "mlp.up" in name)]
    theirs = original["transformer.h.0.mlp.c_fc.weight"].t().reshape(-1)
    assert torch.equal(moved == 0, theirs == 0)
    assert not torch.any((moved == theirs) & (theirs != 0)), "the rest must learn"


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1", "2"])
def test_zeros_of_experts_stay(tiny_set: Path, tmp_path: Path, size: str) -> None:
    folder, run = tmp_path / "pruned", tmp_path / "run"
    save_model(folder, "mixtral")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if ".experts." in name or "_proj.weight" in name:
            tensor.view(-1)[::2] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    flags = (*FLAGS, "--ds", "zero2", "--precision", "fp32", "--expert-parallel-size", size)
    train(tiny_set, run, 2, *flags, "--init-from", f"hf:{folder}")
    shares = zero_share(load_full_weights(find_checkpoint(run)), part=".experts.")
    assert len(shares) == 2 * CONFIGS["mixtral"]["num_hidden_layers"]
    assert set(shares.values()) == {0.5}
