"""Rank script of test_release.py: engines built, trained and released one after the other in one process, and what
tensors each of them leaves behind. A cell is [ds_config, optimizer]."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import resolve_step
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine, release_engine, set_learning_rate
from llmscale.engine.process_group import World
from llmscale.engine.train_step import PhaseTimer, train_step
from tests.rank_end import answer_cells

SHAPE = GPTShape(n_layer=2, n_head=2, n_embd=64, vocab_size=61, seq_len=8)
ACCUMULATION = 2
STEPS = 3


#: How long another thread may keep a tensor: gloo's own hold a collective's a moment longer than its caller waits.
PATIENCE_S = 300.0


def storages() -> dict[int, tuple[int, str]]:
    """Address -> (bytes, what has it) of all memory that a living tensor has."""
    gc.collect()
    actual = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.nbytes():
                actual[storage.data_ptr()] = (storage.nbytes(), f"{thing.dtype} {tuple(thing.shape)}")
    return actual


def left_since(before: Collection[int]) -> list[tuple[int, str]]:
    """What has memory now and had none before, once no other thread is about to let go of it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = [actual for address, actual in storages().items() if address not in before]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def train(ds: dict, optimizer: str, world: World) -> list[float]:
    plan = BatchPlan(ACCUMULATION * world.world_size, 1, ACCUMULATION, ParallelLayout(world.world_size), SHAPE.seq_len)
    parsed = parse_ds_config(ds, "job").with_flags(None, None)
    resolved = resolve_step(parsed, SHAPE, plan, "none", get_optimizer(optimizer))
    engine = build_engine(RunConfig.model_validate({"seed": 0}), resolved)
    draw = torch.Generator().manual_seed(world.rank)
    losses = []
    for _ in range(STEPS):
        set_learning_rate(engine, resolved.optimizer, 1e-3)
        tokens = [torch.randint(SHAPE.vocab_size, (1, SHAPE.seq_len + 1), generator=draw) for _ in range(ACCUMULATION)]
        losses.append(float(train_step(engine, tokens, world.device, PhaseTimer(world.device))))
    release_engine(engine)
    return losses


def release(cell: tuple[dict, str], world: World) -> dict[str, object]:
    before, allocated = set(storages()), torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    losses = [train(*cell, world) for _ in range(2)]
    left: list[list[tuple[int, str]]] = [[]] * world.world_size
    dist.all_gather_object(left, left_since(before))
    return {
        "left_bytes": [sum(num_bytes for num_bytes, _ in of_rank) for of_rank in left],
        "left": [[what for _, what in of_rank] for of_rank in left],
        "gpu_bytes": torch.cuda.memory_allocated() - allocated if torch.cuda.is_available() else 0,
        "losses": losses,
    }


if __name__ == "__main__":
    answer_cells(release)
