"""Rank script of test_muon.py: train a small model with Muon under DeepSpeed, or in a plain loop, on the same samples.

A cell has `ds` (a ds_config), `accumulation`, `steps`, and `dtype` of the Newton-Schulz iteration; or `plain` instead
of `ds`. A second argument `experts` gives the model some. The answer is losses and norms.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.optimizers import MUON
from llmscale.config.resolve import resolve_step
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine, gradient_norm, set_learning_rate
from llmscale.engine.optimizers import MOMENTUM, Muon, build_parameter_groups
from llmscale.engine.process_group import World
from llmscale.engine.train_step import PhaseTimer, train_step
from llmscale.engine.zero_layout import inner_optimizer
from llmscale.model.gpt import GPT
from tests.rank_end import answer_cells

#: Odd sizes, so that borders of partitions cut matrices; q and k, v of different heights; gate and up in one matrix.
SHAPE = GPTShape(n_layer=2, n_head=3, n_embd=36, vocab_size=211, seq_len=12, n_kv_head=1, gated_mlp=True, mlp_width=50)
EXPERTS = SHAPE.changed({"num_experts": 3, "expert_width": 22, "shared_expert_width": 10, "dense_layers": 1})
GLOBAL_BATCH = 8
LR, WEIGHT_DECAY, FACTOR = 3e-3, 0.1, 2.0
OPTIMIZER = MUON.with_matrix_factor(FACTOR)


def samples_of(step: int) -> Tensor:
    """The global batch, which has something to learn: few ids are frequent."""
    draw = torch.Generator().manual_seed(step)
    uniform = torch.rand(GLOBAL_BATCH, SHAPE.seq_len + 1, generator=draw)
    return (SHAPE.vocab_size**uniform).long().clamp(max=SHAPE.vocab_size - 1)


def train(cell: dict, world: World) -> dict[str, list[float]]:
    """Under DeepSpeed, or in a plain loop."""
    if "plain" in cell:
        return train_plainly(cell["steps"])
    rank, world_size = world.rank, world.world_size
    accumulation = cell["accumulation"]
    micro = GLOBAL_BATCH // accumulation // world_size
    plan = BatchPlan(GLOBAL_BATCH, micro, accumulation, ParallelLayout(world_size), SHAPE.seq_len)
    ds = parse_ds_config({"gradient_clipping": 1.0, **cell["ds"]}, "job")
    config = RunConfig.model_validate({"seed": 0, "weight_decay": WEIGHT_DECAY})
    engine = build_engine(config, resolve_step(ds, SHAPE, plan, "none", OPTIMIZER))
    optimizer = inner_optimizer(engine)
    assert isinstance(optimizer, Muon)
    optimizer.dtype = getattr(torch, cell.get("dtype", "float32"))
    actual: dict[str, list[float]] = {"loss": [], "norm": [], "skipped": []}
    for step in range(cell["steps"]):
        mine = samples_of(step)[rank * micro * accumulation :][: micro * accumulation]
        set_learning_rate(engine, OPTIMIZER, LR)
        loss = train_step(engine, mine.split(micro), torch.device("cpu"), PhaseTimer(torch.device("cpu")))
        dist.all_reduce(loss)
        actual["loss"].append(float(loss) / world_size)
        actual["norm"].append(gradient_norm(engine) or 0.0)
    actual["skipped"] = [engine.skipped_steps]
    engine.destroy()
    return actual


def train_plainly(steps: int) -> dict[str, list[float]]:
    """torch.optim.Muon on every matrix and AdamW on the rest, in fp32, the norm in double precision."""
    model = GPT(SHAPE, seed=0, checkpoint=None)
    kinds = SHAPE.tensors.kinds
    groups = build_parameter_groups(model.named_parameters(), kinds, OPTIMIZER, WEIGHT_DECAY)
    matrices = list(matrices_in(model))
    adam = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups[1:]]
    optimizers = [
        torch.optim.Muon(
            [matrix for matrix, _ in matrices],
            lr=LR * FACTOR,
            weight_decay=WEIGHT_DECAY,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(adam, lr=LR, betas=(0.9, 0.95), eps=1e-8),
    ]
    actual: dict[str, list[float]] = {"loss": [], "norm": []}
    for step in range(steps):
        tokens = samples_of(step)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        gradients = [param.grad for param in model.parameters()]
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, 1.0 / (float(norm) + 1e-6)))
        for matrix, gradient in matrices:
            matrix.grad = gradient()
        with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", in_fp32()):
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
        actual["loss"].append(float(loss.detach()))
        actual["norm"].append(float(norm))
    return actual


def matrices_in(model: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """Every matrix that is orthogonalised as a parameter of its own, in the model's memory, and how to get its
    gradient."""
    parameters = dict(model.named_parameters())
    for tensor in SHAPE.tensors.all:
        if tensor.kind != "matrix":
            continue
        complete, begin = parameters[tensor.name], 0
        width = tensor.parameter.columns
        for rows in tensor.parameter.matrix_rows:
            block = slice(begin, begin + rows)
            own = nn.Parameter(complete.data.view(-1, width)[block])
            yield own, lambda complete=complete, block=block, width=width: complete.grad.view(-1, width)[block]
            begin += rows


def in_fp32() -> FunctionType:
    """torch's own iteration without its cast to bf16."""
    from torch.optim import _muon

    def iterate(gradient: Tensor, *args: object) -> Tensor:
        with mock.patch.object(Tensor, "bfloat16", lambda self: self.clone()):
            return original(gradient, *args)

    original = _muon._zeropower_via_newtonschulz
    return iterate


if __name__ == "__main__":
    SHAPE = EXPERTS if sys.argv[2:] == ["experts"] else SHAPE
    answer_cells(train)
