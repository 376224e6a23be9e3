"""The dry run of a GPT: its training run's own engine and model, simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import Tensor

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.config.hardware import has_bf16
from llmscale.config.resolve import ResolvedStep
from llmscale.config.run_config import RunConfig
from llmscale.dry_run.simulate import MOST_MICRO_STEPS, Attribution, DryRun, Simulation, refuse_nvme, simulate
from llmscale.dry_run.simulated_gpu import GPU, fake_row_counts, flash_attention
from llmscale.engine import optimizers
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_engine import build_engine, set_learning_rate
from llmscale.memory.layers import most_rows
from llmscale.model import attention_context, gpt, layers

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def dry_run(
    resolved: ResolvedStep,
    capability: ComputeCapability | None = None,
    compiler: BlockCompiler | None = None,
    *,
    worst_load: bool = False,
) -> DryRun:
    """Simulate training on the GPUs of its plan. `capability` and `worst_load` mean the same as in estimate_memory.

    Raises ConfigError for NVMe offload, whose buffers are filled from files, and in a process that is part of a job.
    """
    refuse_nvme(resolved.ds_config)
    shape = resolved.shape
    plan = resolved.plan
    rows = plan.tokens_per_forward * shape.experts_per_token
    tables = {shape.architecture.token_embedding.shape}
    simulation = Simulation(
        world_size=plan.ranks.world_size,
        micro_steps=min(plan.gradient_accumulation_steps, MOST_MICRO_STEPS),
        attribution=Attribution(tables, {shape.vocab_size, shape.padded_vocab_size}),
        capability=capability,
        # Adafactor divides by the number of its steps, which is on the host. It offloads nothing.
        number_elsewhere=0.0 if resolved.optimizer.steps_shards else 1.0,
    )

    def forward(engine: DeepSpeedEngine) -> Tensor:
        tokens = torch.zeros((plan.micro_batch_size, shape.seq_len + 1), dtype=torch.long, device=GPU)
        loss: Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        return loss

    patches = (
        fake_row_counts(rows, most_rows(shape, rows, plan.ranks) if worst_load else rows),
        gpt_kernels(capability),
    )
    return simulate(lambda: _build(resolved, simulation.micro_steps, compiler), forward, simulation, patches)


def _build(resolved: ResolvedStep, micro_steps: int, compiler: BlockCompiler | None) -> DeepSpeedEngine:
    plan = resolved.plan
    simulated = {
        **resolved.ds_config,
        "gradient_accumulation_steps": micro_steps,
        "train_batch_size": plan.micro_batch_size * micro_steps * plan.ranks.world_size,
    }
    engine = build_engine(RunConfig.model_validate({}), replace(resolved, ds_config=simulated), compiler)
    # Muon orthogonalises nothing at a learning rate of 0.
    set_learning_rate(engine, resolved.optimizer, 1.0)
    return engine


@contextlib.contextmanager
def gpt_kernels(capability: ComputeCapability | None = None) -> Iterator[None]:
    """Let the GPT and its optimizers choose what they choose on a GPU of that compute capability."""
    with (
        mock.patch.object(gpt, "device_capability", lambda _: capability),
        mock.patch.object(gpt, "has_flex_attention", lambda _: True),
        mock.patch.object(attention_context, "attend_in_blocks", _attend_in_blocks),
        mock.patch.object(layers, "sums_in_16_bit", lambda _: False),
        mock.patch.object(optimizers, "has_bf16", lambda: has_bf16(capability)),
    ):
        yield


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, _mask: object) -> Tensor:
    """Run FlexAttention as FlashAttention, which saves the same tensors."""
    return flash_attention(query, key, value, is_causal=True)
