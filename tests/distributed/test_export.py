"""A run saved at any stage and world size is exported as the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.cli.main import main
from llmscale.evaluate.model_source import open_model
from llmscale.evaluate.transformers_package import import_transformers
from tests.checkpoint.written import load_full_weights
from tests.conftest import words
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


def test_every_stage_offload_and_16_bits(train_command: Callable, tmp_path: Path) -> None:
    kinds: list[tuple[dict[str, object], tuple[str, ...]]] = [
        *(({"stage": stage}, ("--precision", "fp32")) for stage in (0, 1, 2, 3)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, ("--precision", "bf16")),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, ("--precision", "bf16", "--no-bias")),
    ]
    runs, commands = [tmp_path / f"run-{number}" for number in range(len(kinds))], []
    for run, (zero, flags) in zip(runs, kinds, strict=True):
        ds = run.with_suffix(".json")
        ds.write_text(json.dumps({"zero_optimization": zero}))
        commands.append(train_command("--ds", str(ds), *THREE_STEPS, "--run", str(run), *flags))
    train_in_turn(commands, 2)
    for run in runs:
        check_export(run / "checkpoints" / "step-00000003", run / "out")
