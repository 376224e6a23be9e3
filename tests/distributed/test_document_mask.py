"""A run with --document-mask is a run with each document alone, and goes on as one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmscale.architecture.layers import ParameterTensors
from llmscale.config.run_arguments import parse_run_config
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.validation import validation_sample_ids
from llmscale.engine.optimizers import build_optimizer
from llmscale.model.gpt import GPT
from llmscale.training.start import Start, prepare_start
from scripts.bench.resume.samples import read_samples
from tests.conftest import (
    TRAIN,
    assert_same_losses,
    build_train_command,
    forget_after,
    read_losses,
    run_ranks,
    words,
)
from tests.runs_in_turn import train_in_turn

STEPS = 10
FLAGS = words(
    f"--document-mask --precision fp32 --steps {STEPS} --save-every 5 --keep-last 9 --lr 3e-3 --check-every 1 "
    f"--val-every {STEPS} --val-samples 16"
)
#: Llama's layers.
LLAMA_FLAGS = words(
    "--positions rotary --norm rmsnorm --gated-mlp --activation silu --n-kv-head 1 --sliding-window 9 --no-bias "
    "--no-tied"
)


def test_losses_are_those_of_a_plain_loop_over_single_documents(short_documents: Path, tmp_path: Path) -> None:
    models = {"gpt2": (), "llama": LLAMA_FLAGS}
    commands = {
        name: build_train_command(short_documents, tmp_path / name, *FLAGS, *flags, "--ds", "zero2")
        for name, flags in models.items()
    }
    for name, output in zip(models, train_in_turn([*commands.values()], 2), strict=True):
        assert "documents do not see each other: 2" in output
        run = prepare_start(parse_run_config([word for word in commands[name] if word != str(TRAIN)]), 2)
        assert run.resolved.shape.document_end == 256
        losses, validation = plain_losses(run, read_samples(tmp_path / name))
        assert read_losses(tmp_path / name) == pytest.approx(dict(enumerate(losses, 1)), rel=1e-5)
        assert read_losses(tmp_path / name, "validation") == pytest.approx({STEPS: validation}, rel=1e-5)


@pytest.mark.slow
def test_goes_on_bit_by_bit_and_elsewhere(short_documents: Path, tmp_path: Path) -> None:
    def train(ds_config: str, world_size: int, *flags: str) -> dict[int, float]:
        run_ranks(build_train_command(short_documents, tmp_path / "run", *FLAGS, *flags, "--ds", ds_config), world_size)
        return read_losses(tmp_path / "run")

    straight = train("zero2", 2)
    forget_after(tmp_path / "run", 5)
    assert train("zero2", 2) == straight
    for ds_config, mode in (("zero3", "selective"), ("zero1", "full")):
        forget_after(tmp_path / "run", 5)
        assert_same_losses(train(ds_config, 1, "--activation-checkpointing", mode), straight)


def plain_losses(run: Start, sample_ids: dict[int, np.ndarray]) -> tuple[list[float], float]:
    """Training losses by step, and the validation's after the last, of torch alone, a document at a time."""
    resolved = run.resolved
    model, optimizer = plain_optimizer(run)
    train, validation = (TokenShards(run.sets.first, split) for split in ("train", "val"))
    losses = []
    for step in range(STEPS):
        loss = mean_loss(model, train.read(sample_ids[step]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = resolved.schedule.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, mean_loss(model, validation.read(validation_sample_ids(len(validation), 16))).item()


def plain_optimizer(run: Start) -> tuple[GPT, torch.optim.Optimizer]:
    """The run's model without a document mask, and its optimizer."""
    config, resolved = run.config, run.resolved
    shape = replace(resolved.shape, document_end=None)
    model = GPT(shape, seed=config.seed)
    kinds = ParameterTensors(shape.architecture).kinds
    betas = (config.beta1, config.beta2)
    optimizer = build_optimizer(
        model, kinds, resolved.optimizer, lr=0.0, weight_decay=config.weight_decay, betas=betas, eps=config.eps
    )
    return model, optimizer


def mean_loss(model: GPT, windows: np.ndarray) -> torch.Tensor:
    """Mean over all tokens of windows [b, T + 1]."""
    total = torch.zeros(())
    for window in torch.from_numpy(windows.astype(np.int64)):
        ends = [int(index) + 1 for index in (window[:-1] == 256).nonzero()]
        for first, last in pairwise(sorted({0, *ends, len(window) - 1})):
            logits = model(window[None, first:last])
            total = total + F.cross_entropy(logits[0], window[first + 1 : last + 1], reduction="sum")
    return total / windows[:, 1:].size
