"""Inputs of the estimate of DeepSpeed's own memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.config.deepspeed.schema import Dtype, ResolvedDsConfig, ResolvedZero
from llmscale.config.optimizers import OptimizerGroup, OptimizerSpec
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.breakdown import ALLOCATION_BYTES, allocated_bytes

BYTES_PER_ELEMENT: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@lru_cache(maxsize=4096)
def tensor_bytes(elements: int, dtype: Dtype) -> int:
    """What a tensor takes on the GPU."""
    return allocated_bytes(elements, BYTES_PER_ELEMENT[dtype])


def state_tensor_bytes(group: OptimizerGroup, elements: int) -> int:
    """What the optimizer's own states of one tensor take on the GPU, without the fp32 master weights."""
    return len(group.states) * tensor_bytes(elements, "fp32") + len(group.scalars) * ALLOCATION_BYTES


@dataclass(frozen=True)
class ZeroSetup:
    """Everything that DeepSpeed's own memory follows from, beside the list of parameters."""

    config: ResolvedDsConfig
    shard_ranks: int
    """Ranks that ZeRO divides model states over."""
    optimizer: OptimizerSpec

    @property
    def zero(self) -> ResolvedZero:
        return self.config.zero

    @property
    def stage(self) -> int:
        return self.config.zero.stage

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-steps."""
        return self.config.gradient_accumulation_steps > 1

    def with_micro_steps(self, steps: int) -> ZeroSetup:
        """Return the setup with `steps` micro-steps, and without the batch sizes, on which no memory depends."""
        batch = {"gradient_accumulation_steps": steps, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
        return replace(self, config=self.config.model_copy(update=batch))


def zero_setup(step: ResolvedStep, capability: ComputeCapability | None = None) -> ZeroSetup:
    """Return the setup of a step on GPUs of that compute capability; None means Ampere or newer."""
    return ZeroSetup(step.engine_config, step.plan.ranks.shard_ranks, step.optimizer.on_gpu(capability))
