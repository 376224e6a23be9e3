"""Rank script of test_gradient_sums.py: 64 micro-batches through an engine, and how far the gradient that the optimizer
gets is from the exact sum of the very same micro-batches' gradients. A cell is [ds_config, precision]."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.resolve import resolve_step
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine
from llmscale.engine.process_group import World
from llmscale.model.gpt import GPT
from tests.distributed.watched_step import watched_step
from tests.rank_end import answer_cells

MICRO_STEPS = 64
#: Static, of fp16; a power of two changes nothing in bf16.
LOSS_SCALE = 1024
SHAPE = GPTShape(n_layer=1, n_head=2, n_embd=32, vocab_size=61, seq_len=8)


def tokens_of(rank: int) -> list[Tensor]:
    """A rank's micro-batches, the same in every process that asks."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(SHAPE.vocab_size, (1, SHAPE.seq_len + 1), generator=draw) for _ in range(MICRO_STEPS)]


@lru_cache
def exact_gradients(dtype: torch.dtype, world_size: int) -> dict[str, Tensor]:
    """The mean over all ranks' micro-batches of gradients that are computed in `dtype`, summed in double precision."""
    model = GPT(SHAPE, seed=0, checkpoint=None).to(dtype)
    sums = {name: torch.zeros(param.numel(), dtype=torch.float64) for name, param in model.named_parameters()}
    for rank in range(world_size):
        for tokens in tokens_of(rank):
            model.zero_grad(set_to_none=True)
            (LOSS_SCALE * model(tokens[:, :-1], tokens[:, 1:]) / MICRO_STEPS).backward()
            for name, param in model.named_parameters():
                sums[name] += param.grad.double().view(-1)
    return {name: total / (world_size * LOSS_SCALE) for name, total in sums.items()}


def error_of(cell: tuple[dict, str], world: World) -> dict[str, object]:
    """Norm of the difference over norm of the exact gradient, over all ranks' parts."""
    (ds, name), world_size = cell, world.world_size
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    exact = exact_gradients(dtype, world_size)
    plan = BatchPlan(MICRO_STEPS * world_size, 1, MICRO_STEPS, ParallelLayout(world_size), SHAPE.seq_len)
    resolved = resolve_step(parse_ds_config(ds, "job").with_flags(None, 0.0), SHAPE, plan, "none")
    engine = build_engine(RunConfig.model_validate({"seed": 0}), resolved)
    _, error = watched_step(engine, tokens_of(world.rank), exact)
    engine.destroy()
    return {"error": error}


if __name__ == "__main__":
    answer_cells(error_of)
