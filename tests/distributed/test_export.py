"""A run saved at any stage and world size is exported as the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.cli.main import main
from llmscale.evaluate.model_source import open_model
from scripts.bench.transformers_package import import_transformers
from tests.checkpoint.written import load_full_weights
from tests.conftest import run_ranks, words
from tests.runs_in_turn import train_in_turn

pytest.importorskip("transformers")


THREE_STEPS = words("--steps 3 --lr 1e-2")


def check_export(checkpoint: Path, out: Path) -> None:
    """transformers has every weight bit for bit, and computes what our model computes."""
    assert main(["export", str(checkpoint.parents[1]), "--to", str(out), "--shard-size", "50KB"]) == 0
    transformers = import_transformers()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    ours = open_model(checkpoint).load_model().cpu()
    tokens = torch.randint(257, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (theirs.eval()(tokens).logits - ours(tokens)).abs().max() < 1e-5
    weights = load_full_weights(checkpoint)
    state = theirs.state_dict()
    assert torch.equal(state["transformer.wte.weight"].flatten(), weights["wte.weight"][: 257 * 32])
    for block in (0, 1):
        up = weights[f"blocks.{block}.mlp.up.weight"].view(128, 32)
        assert torch.equal(state[f"transformer.h.{block}.mlp.c_fc.weight"], up.t())


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_stage_world_size_offload_and_16_bits(world_size: int, train_command: Callable, tmp_path: Path) -> None:
    """A world of one shards nothing, so it has one stage only."""
    kinds: list[tuple[dict[str, object], tuple[str, ...]]] = [({"stage": 0}, ("--precision", "fp32"))]
    if world_size > 1:
        kinds += [({"stage": stage}, ("--precision", "fp32")) for stage in (1, 2, 3)]
        kinds += [
            ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, ("--precision", "bf16")),
            ({"stage": 3, "offload_param": {"device": "cpu"}}, ("--precision", "bf16", "--no-bias")),
        ]
    runs, commands = [tmp_path / f"run-{number}" for number in range(len(kinds))], []
    for run, (zero, flags) in zip(runs, kinds, strict=True):
        ds = run.with_suffix(".json")
        ds.write_text(json.dumps({"zero_optimization": zero}))
        commands.append(train_command("--ds", str(ds), *THREE_STEPS, "--run", str(run), *flags))
    train_in_turn(commands, world_size)
    for run in runs:
        check_export(run / "checkpoints" / "step-00000003", run / "out")


LLAMA = "--norm rmsnorm --positions rotary --activation silu --gated-mlp --no-bias --n-kv-head 1"


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("--activation gelu_tanh --no-bias", id="gpt2", marks=pytest.mark.slow),
        pytest.param(f"{LLAMA} --mlp-width 72 --attention-bias qkv", id="qwen2"),
    ],
)
def test_what_begins_with_an_export_is_exported_alike(shape: str, train_command: Callable, tmp_path: Path) -> None:
    """Byte for byte, as long as no weight has changed."""
    check_tree = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    run_ranks(train_command("--ds", "zero0", *THREE_STEPS, "--precision", "fp32", *words(shape)), 1)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["export", str(tmp_path / "run"), "--to", str(first)]) == 0
    # Smaller than any number of 32 bits: a step changes nothing.
    flags = ("--init-from", f"hf:{first}", "--run", str(tmp_path / "again"), "--steps", "1", "--lr", "1e-320")
    # The weights say what the model is.
    run_ranks(train_command("--ds", "zero3", "--precision", "fp32", *flags, model=()), 2)
    assert main(["export", str(tmp_path / "again"), "--to", str(second)]) == 0
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for name in check_tree:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
