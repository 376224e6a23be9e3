"""Settings that determine DeepSpeed's memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype, ResolvedDsConfig, ResolvedZero
from llmscale.config.optimizers import OptimizerGroup, OptimizerSpec
from llmscale.config.resolve import ResolvedStep

BYTES_PER_ELEMENT: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class ZeroSetup:
    """Settings that determine DeepSpeed's memory, apart from the list of parameters."""

    config: ResolvedDsConfig
    shard_ranks: int
    """Ranks that ZeRO divides model states over."""
    optimizer: OptimizerSpec
    expert_parallel_size: int = 1
    """Ranks that divide the experts of a block."""

    @property
    def zero(self) -> ResolvedZero:
        return self.config.zero

    @property
    def stage(self) -> int:
        return self.config.zero.stage

    def ranks_of(self, tensor: ParameterTensor) -> int:
        """Return the ranks that ZeRO divides the states of a parameter over."""
        return self.shard_ranks // (self.expert_parallel_size if tensor.parameter.is_stacked else 1)

    def groups(self, tensors: ParameterTensors) -> list[tuple[OptimizerGroup, list[ParameterTensor]]]:
        """Return the optimizer's groups of trained parameters; divided experts have groups of their own at the end."""
        groups = [(group, list(members)) for group, members in self.optimizer.group_tensors(tensors.trainable)]
        if self.expert_parallel_size == 1:
            return groups
        divided = [
            (group, [tensor for tensor in members if tensor.parameter.is_stacked == is_stacked])
            for is_stacked in (False, True)
            for group, members in groups
        ]
        return [(group, members) for group, members in divided if members]

    @property
    def accumulates(self) -> bool:
        """True when a step has several micro-steps."""
        return self.config.gradient_accumulation_steps > 1

    @property
    def offloads_optimizer(self) -> bool:
        return self.config.zero.offload_optimizer.device != "none"

    def with_micro_steps(self, steps: int) -> ZeroSetup:
        """Return the setup with `steps` micro-steps, and without settings on which no model state depends.

        Rows that differ only in these are then estimated once.
        """
        batch = {"gradient_accumulation_steps": steps, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
        return replace(self, config=self.config.model_copy(update={**batch, "activation_checkpointing": None}))


def zero_setup(step: ResolvedStep, capability: ComputeCapability | None = None) -> ZeroSetup:
    """Return the setup of a step on GPUs of that compute capability; None means Ampere or newer."""
    ranks = step.plan.ranks
    optimizer = step.stored_optimizer.on_gpu(capability)
    return ZeroSetup(step.engine_config, ranks.world_size, optimizer, ranks.expert_parallel_size)
