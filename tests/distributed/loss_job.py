"""Rank script of test_loss.py and test_sequence_parallel.py: one optimizer step with the loss in small chunks, and how
far loss and gradients are from those of the whole loss in double precision, without DeepSpeed. Ranks may divide
sequences and experts, and routers of experts have losses of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.loss_settings import LossSettings
from llmscale.config.resolve import resolve_step
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine
from llmscale.engine.process_group import World
from llmscale.model.gpt import GPT
from tests.distributed.watched_step import watched_step
from tests.rank_end import answer_cells

MICRO_BATCH = 3
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61, "seq_len": 8}
SHAPES = {
    "gpt2": build_shape(SMALL),
    "gpt2-documents": build_shape({**SMALL, "document_end": 3}),
    "llama": build_shape(
        {**SMALL, "norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True}
        | {"tied": False, "n_kv_head": 1}
    ),
}
EXPERTS = {"num_experts": 5, "experts_per_token": 2, "expert_width": 24, "shared_expert_width": 16, "router_bias": True}
SHAPES["experts"] = SHAPES["llama"].changed({**EXPERTS, "dense_layers": 1, "n_layer": 3})
SHAPES["4-experts"] = SHAPES["experts"].changed({"num_experts": 4})
SHAPES["1-of-4-experts"] = SHAPES["4-experts"].changed({"experts_per_token": 1})
#: Weights of the balance loss and of the routers' z-loss.
ROUTER_LOSSES = (0.1, 0.01)
SHAPES |= {f"{name}-4-heads": shape.changed({"n_head": 4, "n_kv_head": 2}) for name, shape in SHAPES.items()}
SHAPES["post"] = replace(SHAPES["llama-4-heads"], norm_placement="post", qk_norm="width")
#: Parts of a sequence that do not divide it, and the last of which is nothing but padding.
SHAPES |= {f"llama-of-{t}": replace(SHAPES["llama-4-heads"], seq_len=t, sliding_window=3) for t in (7, 5)}
#: Of 24 tokens: four chunks, the last one smaller; and all at once.
CHUNKS = {"small": 7, "whole": 1000}


def tokens_of(rank: int, accumulation: int, shape: GPTShape) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    size = (MICRO_BATCH, shape.seq_len + 1)
    # Equal tokens all go to the same expert.
    vocab_size = 1 if shape.experts_per_token == 1 else shape.vocab_size
    return [torch.randint(vocab_size, size, generator=draw) for _ in range(accumulation)]


def exact_step(cell: dict, shape: GPTShape, world_size: int, rank: int) -> tuple[float, dict[str, Tensor]]:
    """A rank's loss, and the gradients that all ranks have together. `world_size` and `rank`: groups that divide a
    sequence."""
    model, own = GPT(shape, seed=0), 0.0
    # Routers compute in fp32.
    model = model if shape.num_experts else model.double()
    routed: list[Tensor] = []
    for block in model.blocks:
        if block.is_sparse:
            block.mlp.router.register_forward_hook(lambda *call: routed.append(call[-1]))
    parts = world_size * cell["accumulation"]
    for of_rank in range(world_size):
        for tokens in tokens_of(of_rank, cell["accumulation"], shape):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            of_routers = sum(router_loss(routed.pop().unflatten(0, tokens[:, 1:].shape), shape) for _ in list(routed))
            ((loss + cell["z_loss"] * logits.logsumexp(-1).square().mean() + of_routers) / parts).backward()
            own += float(loss.detach()) / cell["accumulation"] if of_rank == rank else 0.0
    return own, {name: param.grad.view(-1) for name, param in model.named_parameters()}


def router_loss(logits: Tensor, shape: GPTShape) -> Tensor:
    """Switch's balance loss of each sequence and ST-MoE's z-loss, from logits [batch, t, experts]."""
    shares, count = logits.softmax(-1), shape.experts_per_token
    chosen = F.one_hot(shares.topk(count).indices, logits.shape[-1]).sum(2).float()
    balance = logits.shape[-1] * (chosen.mean(1) / count * shares.mean(1)).sum(1).mean()
    return ROUTER_LOSSES[0] * balance + ROUTER_LOSSES[1] * logits.logsumexp(-1).square().mean()


def run(cell: dict, world: World) -> dict[str, float]:
    rank, world_size = world.rank, world.world_size
    shape, accumulation = SHAPES[cell["shape"]], cell["accumulation"]
    shape = replace(shape, mlp_tile_tokens=cell.get("tile", 0))
    ranks = ParallelLayout(world_size, cell.get("split", 1), cell.get("experts", 1))
    group, groups = ranks.group_of(rank), ranks.data_parallel_size
    loss, exact = exact_step(cell, shape, groups, group)
    plan = BatchPlan(MICRO_BATCH * accumulation * groups, MICRO_BATCH, accumulation, ranks, shape.seq_len)
    precision = {"autocast": "torch_autocast"}.get(cell["precision"], cell["precision"])
    config = {
        "zero_optimization": {"stage": cell["stage"], **cell.get("zero", {})},
        **({} if precision == "fp32" else {precision: FP16 if precision == "fp16" else ON}),
    }
    config |= {"communication_data_type": cell["exchange"]} if "exchange" in cell else {}
    settings = LossSettings(CHUNKS[cell["chunks"]], cell["z_loss"], "torch", *ROUTER_LOSSES)
    resolved = resolve_step(
        parse_ds_config(config, "job").with_flags(None, 0.0), shape, plan, cell["checkpointing"], loss=settings
    )
    engine = build_engine(RunConfig.model_validate({"seed": 0}), resolved)
    actual, error = watched_step(engine, tokens_of(group, accumulation, shape), exact)
    if split := engine.module.split:
        total = torch.tensor(actual)
        dist.all_reduce(total, group=split.group)
        actual = float(total) / split.size
    engine.destroy()
    return {"loss": abs(actual - loss), "gradient": error}


ON = {"enabled": True}
#: With the usual first scale the step would be skipped.
FP16 = {**ON, "initial_scale_power": 10}

if __name__ == "__main__":
    answer_cells(run)
