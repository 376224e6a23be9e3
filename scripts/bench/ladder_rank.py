"""What a rank does on a lower rung of ladder.py: train, and be timed. Imports no more than such a loop needs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from contestants import Contest
from ladder_gpt import NaiveGPT, Ways

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


def resident_bytes() -> int:
    """Of this process, now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
