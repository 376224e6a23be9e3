"""Fine-tuning a pruned model: what was zero stays zero at every stage, compiled or not, and only where it is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.load import load_full_weights
from llmscale.cli.main import main
from tests.conftest import build_train_command

STEPS = ("--steps", "3", "--lr", "1e-2", "--warmup-steps", "0", "--micro-batch-size", "2")
LAYERS = ("attn.qkv.weight", "attn.proj.weight", "mlp.up.weight", "mlp.down.weight")
Train = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def train(ranks: Callable, tiny_set: Path, tmp_path: Path) -> Train:
    """`train(name, world_size, *flags)`: the weights of the last step, by parameter."""

    def run(name: str, world_size: int, *flags: str) -> dict[str, torch.Tensor]:
        command = build_train_command(tiny_set, tmp_path / name, *STEPS, *flags)
        if "--init-from" in flags:
            # The folder says what the model is.
            for flag in ("--model", "--n-layer", "--n-head", "--n-embd"):
                place = command.index(flag)
                del command[place : place + 2]
        job = ranks(command, world_size)
        output = job.wait(600)
        assert job.exit_codes == [0] * world_size, output
        return load_full_weights(tmp_path / name / "checkpoints" / "step-00000003")

    return run


@pytest.fixture
def pruned(train: Train, tmp_path: Path) -> str:
    """--init-from of a pruned model."""
    train("dense", 1)
    assert main(["prune", str(tmp_path / "dense"), "--to", str(tmp_path / "pruned"), "--val-samples", "8"]) == 0
    return f"hf:{tmp_path / 'pruned'}"


def share_of_zeros(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of every linear layer of the blocks, the groups of four in which exactly two are zero."""
    found = {}
    for name, weight in weights.items():
        if name.endswith(LAYERS):
            found[name] = ((weight.view(-1, 4) == 0).sum(1) == 2).double().mean().item()
    assert len(found) == 8
    return found


def test_pruned_weights_stay_zero_at_stage_3(train: Train, pruned: str) -> None:
    kept = train("kept", 2, "--ds", "ds_configs/zero3.json", "--init-from", pruned, "--keep-zeros")
    assert set(share_of_zeros(kept).values()) == {1.0}
    # Everything else is trained: biases were zeros when the first run began.
    assert all(weight.count_nonzero() for weight in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_pruned_weights_stay_zero_at_every_stage(train: Train, pruned: str, stage: int, precision: str) -> None:
    flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", precision, "--init-from", pruned)
    assert set(share_of_zeros(train("kept", 2, *flags, "--keep-zeros")).values()) == {1.0}
    assert max(share_of_zeros(train("lost", 2, *flags)).values()) < 0.1


@pytest.mark.slow
def test_pruned_weights_stay_zero_in_compiled_blocks(
    train: Train, pruned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for stage in (2, 3):
        flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", "fp32", "--init-from", pruned)
        weights = train(f"compiled{stage}", 2, *flags, "--keep-zeros", "--compile", "on")
        assert set(share_of_zeros(weights).values()) == {1.0}
