"""What a rank does on a rung of ladder.py: train and be timed, or be counted on tensors without storage."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from contestants import Contest
from ladder_gpt import NaiveGPT, Ways

from llmscale.config.resolve import ResolvedRun
from llmscale.dry_run.cuda_kernels import cuda_kernels, kernel_workspace
from llmscale.dry_run.engine import dry_run
from llmscale.dry_run.fake_gpu import GPU, fake_gpu
from llmscale.dry_run.fake_world import fake_tensors_move
from llmscale.dry_run.tracker import Category, MemoryTracker
from llmscale.engine.device_settings import allow_tf32
from llmscale.model.gpt import GPT
from llmscale.training.run_folder import METRICS_NAME


def train_plain(contest: Contest, ways: Ways) -> None:
    """Until somebody ends it, on the samples of `contest.windows`, over and over. The first loss is put where train.py
    would put it."""
    resolved = contest.run.resolved
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allow_tf32("fp32")
    model = NaiveGPT(resolved.shape, ways)
    model.take_weights(GPT(resolved.shape, seed=contest.run.config.seed))
    model.to(device)
    optimizer = model.build_optimizer(1e-4, is_gpu=device.type == "cuda")
    windows, batch = np.load(contest.windows, mmap_mode="r"), resolved.plan.micro_batch_size
    for step in itertools.count():
        begin = step * batch % (len(windows) - batch + 1)
        tokens = torch.from_numpy(windows[begin : begin + batch].astype(np.int64)).to(device, non_blocking=True)
        loss = model.train_step(tokens, optimizer)
        if step % ways.reads_loss_every == 0:
            value = loss.item()
            if step == 0:
                save_first_loss(contest.run.config.run, value)
        contest.pace.step_done()


def save_first_loss(folder: Path, loss: float) -> None:
    folder.mkdir(parents=True)
    (folder / METRICS_NAME).write_text(json.dumps({"kind": "train", "loss": loss}) + "\n")


def read_first_loss(folder: Path) -> float:
    """In nats, before the first step."""
    lines = (folder / METRICS_NAME).read_text().splitlines()
    return next(record["loss"] for record in map(json.loads, lines) if record["kind"] == "train")


def count_plain(resolved: ResolvedRun, ways: Ways) -> int:
    """Peak bytes of tensors on a GPU of Ampere's or newer, over two steps."""
    batch, shape = resolved.plan.micro_batch_size, resolved.shape
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_gpu())
        stack.enter_context(torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(fake_tensors_move())
        stack.enter_context(cuda_kernels())
        # Tensors without storage have no values, and AdamW divides by a function of its count of steps.
        stack.enter_context(mock.patch("torch.optim.adam._get_value", lambda _: 1.0))
        tracker = stack.enter_context(MemoryTracker(device=GPU, workspace=kernel_workspace))
        with tracker.phase("all", Category.TEMPORARIES):
            model = NaiveGPT(shape, ways).to(GPU)
            optimizer = model.build_optimizer(1e-4, is_gpu=True)
            for _ in range(2):
                tokens = torch.zeros((batch, shape.seq_len + 1), dtype=torch.long, device=GPU)
                model.train_step(tokens, optimizer)
        return tracker.peaks["all"].breakdown.total_bytes


def count_product(resolved: ResolvedRun) -> int:
    """Peak bytes of tensors per GPU, as the dry run of the real engine has it, eager blocks."""
    result = dry_run(resolved)
    return max(moment.total_bytes for moment in (result.forward, result.backward, result.step))


def resident_bytes() -> int:
    """Of this process, now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
