"""What training saved at any stage and world size is exported as the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.load import load_full_weights
from llmscale.cli.main import main
from llmscale.evaluate.load_model import load_trained_model
from scripts.bench.transformers_package import import_transformers

pytest.importorskip("transformers")


@pytest.fixture
def train(ranks: Callable, train_command: Callable, tmp_path: Path) -> Callable[..., Path]:
    """`train(ds_config, world_size, *flags)`: three steps; the checkpoint."""

    def run(ds_config: Path | str, world_size: int, *flags: str) -> Path:
        job = ranks(train_command("--ds", str(ds_config), "--steps", "3", "--lr", "1e-2", *flags), world_size)
        output = job.wait()[0]
        assert job.exit_codes == [0] * world_size, output
        return tmp_path / "run" / "checkpoints" / "step-00000003"

    return run


def check_export(checkpoint: Path, out: Path) -> None:
    """transformers has every weight bit for bit, and computes what our model computes."""
    assert main(["export", str(checkpoint.parents[1]), "--to", str(out), "--shard-size", "50KB"]) == 0
    transformers = import_transformers()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    ours = load_trained_model(checkpoint).model.cpu()
    tokens = torch.randint(257, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (theirs.eval()(tokens).logits - ours(tokens)).abs().max() < 1e-5
    weights = load_full_weights(checkpoint)
    state = theirs.state_dict()
    assert torch.equal(state["transformer.wte.weight"].flatten(), weights["wte.weight"][: 257 * 32])
    for block in (0, 1):
        up = weights[f"blocks.{block}.mlp.up.weight"].view(128, 32)
        assert torch.equal(state[f"transformer.h.{block}.mlp.c_fc.weight"], up.t())


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        *((0, 1), (0, 2), (1, 2), (2, 2), (3, 2)),
        *(pytest.param(stage, 1, marks=pytest.mark.slow) for stage in (1, 2, 3)),
    ],
)
def test_every_stage_and_world_size(stage: int, world_size: int, train: Callable[..., Path], tmp_path: Path) -> None:
    check_export(train(f"ds_configs/zero{stage}.json", world_size, "--precision", "fp32"), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, ("--precision", "bf16")),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, ("--precision", "bf16", "--no-bias")),
    ],
    ids=["offload", "offload-stage-3"],
)
def test_offload_and_16_bits(
    changes: dict[str, object], flags: tuple[str, ...], train: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": changes}))
    check_export(train(tmp_path / "ds.json", 2, *flags), tmp_path / "out")


@pytest.mark.parametrize(
    "shape",
    [
        ("--activation", "gelu_tanh", "--no-bias"),
        (
            *("--norm", "rmsnorm", "--positions", "rotary", "--activation", "silu", "--gated-mlp", "--no-bias"),
            *("--n-kv-head", "1", "--mlp-width", "72", "--attention-bias", "qkv"),
        ),
    ],
    ids=["gpt2", "qwen2"],
)
def test_what_begins_with_an_export_is_exported_alike(
    shape: tuple[str, ...], train: Callable[..., Path], train_command: Callable, ranks: Callable, tmp_path: Path
) -> None:
    """Byte for byte, as long as no weight has changed."""
    check_tree = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    train("ds_configs/zero0.json", 1, "--precision", "fp32", *shape)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["export", str(tmp_path / "run"), "--to", str(first)]) == 0
    # Smaller than any number of 32 bits: a step changes nothing.
    flags = ("--init-from", f"hf:{first}", "--run", str(tmp_path / "again"), "--steps", "1", "--lr", "1e-320")
    command = train_command("--ds", "ds_configs/zero3.json", "--precision", "fp32", *flags)
    # The weights say what the model is.
    for name in ("--model", "--n-layer", "--n-head", "--n-embd"):
        place = command.index(name)
        del command[place : place + 2]
    job = ranks(command, 2)
    output = job.wait()[0]
    assert job.exit_codes == [0, 0], output
    assert main(["export", str(tmp_path / "again"), "--to", str(second)]) == 0
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for name in check_tree:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
