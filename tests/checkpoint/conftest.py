"""A checkpoint of a few tensors, written by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmscale.checkpoint.manifest import checkpoint_name, checkpoints_folder
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver, Snapshot
from llmscale.checkpoint.tensor_files import Fragment
from llmscale.engine.collectives import Disks


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with a world of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build_snapshot(step: int, numbers: int = 1000) -> Snapshot:
    """Two tensors whose values are known: master/w is 0, 1, 2, ... + step."""
    state = RunState(
        step=step,
        samples_seen=8 * step,
        tokens_seen=256 * step,
        skipped_steps=0,
        identity={"seed": 1},
        precision="fp32",
        optimizer_scalars={"decay": {"step": float(step)}},
    )
    values = torch.arange(numbers, dtype=torch.float32) + step
    fragments = {"master/w": Fragment(values, 0, numbers), "exp_avg/w": Fragment(values / 2, 0, numbers)}
    return Snapshot(step, state.tokens_seen, 2, "fp32", state.as_dict(), fragments)


@pytest.fixture
def save_steps(one_rank: None, tmp_path: Path) -> Callable[..., list[str]]:
    """`save_steps(1, 2, 3)` saves these steps to tmp_path/run; returns what was reported."""

    def save(
        *steps: int, keep_last: int = 9, keep_every: int = 0, in_background: bool = False, **more: Any
    ) -> list[str]:
        lines: list[str] = []
        saver = CheckpointSaver(
            tmp_path / "run",
            keep_last=keep_last,
            keep_every=keep_every,
            in_background=in_background,
            report=lines.append,
            disks=Disks((0,)),
            **more,
        )
        for step in steps:
            saver.save(build_snapshot(step))
        saver.wait()
        return lines

    return save


def folder_of(run: Path, step: int) -> Path:
    return checkpoints_folder(run) / checkpoint_name(step)
