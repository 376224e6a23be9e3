"""What of a resolved ds_config decides memory, typed. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from llmscale.config.deepspeed.sections import (
    Bf16,
    DsFile,
    Dtype,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
    Precision,
    ZeroOptimization,
)
from llmscale.config.optimizers import ADAMW, OptimizerGroup, OptimizerSpec
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.errors import ConfigError
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
class OffloadLayout:
    """One of the two offload sections."""

    device: OffloadDevice = "none"
    pin_memory: bool = False
    """Page-locked host memory, so that copies to the GPU run beside the arithmetic."""
    buffer_count: int = 4
    """NVMe: buffers in host memory."""
    buffer_size: int = 100_000_000
    """NVMe, parameters: elements per buffer."""
    max_in_cpu: int = 1_000_000_000
    """NVMe, parameters: elements that stay in host memory."""
    pipeline_read: bool = False
    """NVMe, optimizer: read the next sub-group while one is stepped."""
    pipeline_write: bool = False
    """NVMe, optimizer: write the last sub-group while the next is stepped."""


@dataclass(frozen=True)
class EngineLayout:
    """How DeepSpeed lays a model out over ranks. Sizes of buffers in elements."""

    zero_stage: int
    ranks: ParallelLayout
    optimizer: OptimizerSpec
    precision: Precision
    grad_accum_dtype: Dtype
    """What gradients are summed in over micro-batches."""
    communication_dtype: Dtype
    """What gradients are reduced in."""
    gradient_accumulation_steps: int
    gradient_clipping: float
    """0: no clipping."""
    contiguous_gradients: bool
    reduce_scatter: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    use_multi_rank_bucket_allreduce: bool
    overlap_comm: bool
    round_robin_gradients: bool
    parameter_alignment: bool
    check_grad_overflow: bool
    immediate_grad_update: bool
    sub_group_size: int
    stage3_prefetch_bucket_size: int
    stage3_param_persistence_threshold: int
    stage3_model_persistence_threshold: int
    stage3_max_live_parameters: int
    stage3_max_reuse_distance: int
    zero_hpz_partition_size: int
    memory_efficient_linear: bool
    offload_optimizer: OffloadLayout
    offload_param: OffloadLayout
    cpu_checkpointing: bool
    """Saved activations go to host memory."""

    @property
    def model_dtype(self) -> Dtype:
        """What the parameters are stored in between steps."""
        return "fp32" if self.precision == "autocast" else self.precision

    @property
    def parameter_width(self) -> int:
        """Bytes of one stored parameter."""
        return BYTES_PER_ELEMENT[self.model_dtype]


def build_layout(
    ds_config: Mapping[str, object], ranks: ParallelLayout, optimizer: OptimizerSpec = ADAMW
) -> EngineLayout:
    """The layout of what `config.deepspeed.resolve` returns; ConfigError when it is not resolved."""
    keys = DsFile.model_validate(dict(ds_config))
    zero = keys.zero
    if not isinstance(keys.gradient_accumulation_steps, int) or keys.communication_data_type is None:
        raise ConfigError("this ds_config still has open values; memory is estimated from a resolved one.")
    if keys.data_types is None or keys.data_types.grad_accum_dtype is None:
        raise ConfigError("this ds_config has no data_types.grad_accum_dtype; memory is estimated from a resolved one.")
    return EngineLayout(
        zero_stage=zero.stage,
        ranks=ranks,
        optimizer=optimizer,
        precision=keys.precision,
        grad_accum_dtype=keys.data_types.grad_accum_dtype,
        communication_dtype=keys.communication_data_type,
        gradient_accumulation_steps=keys.gradient_accumulation_steps,
        gradient_clipping=_number(keys.gradient_clipping, "gradient_clipping"),
        contiguous_gradients=zero.contiguous_gradients,
        reduce_scatter=zero.reduce_scatter,
        reduce_bucket_size=_size(zero, "reduce_bucket_size"),
        allgather_bucket_size=zero.allgather_bucket_size,
        use_multi_rank_bucket_allreduce=zero.use_multi_rank_bucket_allreduce,
        overlap_comm=zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm,
        round_robin_gradients=zero.round_robin_gradients,
        parameter_alignment=zero.parameter_alignment,
        check_grad_overflow=(keys.bf16 or Bf16(enabled=False)).check_grad_overflow,
        immediate_grad_update=(keys.bf16 or Bf16(enabled=False)).immediate_grad_update,
        sub_group_size=zero.sub_group_size,
        stage3_prefetch_bucket_size=_size(zero, "stage3_prefetch_bucket_size"),
        stage3_param_persistence_threshold=_size(zero, "stage3_param_persistence_threshold"),
        stage3_model_persistence_threshold=zero.stage3_model_persistence_threshold,
        stage3_max_live_parameters=zero.stage3_max_live_parameters,
        stage3_max_reuse_distance=zero.stage3_max_reuse_distance,
        zero_hpz_partition_size=zero.zero_hpz_partition_size,
        memory_efficient_linear=zero.memory_efficient_linear,
        offload_optimizer=_offload(zero.offload_optimizer),
        offload_param=_offload(zero.offload_param),
        cpu_checkpointing=bool(keys.activation_checkpointing and keys.activation_checkpointing.cpu_checkpointing),
    )


def _size(zero: ZeroOptimization, name: str) -> int:
    return int(_number(getattr(zero, name), f"zero_optimization.{name}"))


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float):
        raise ConfigError(f"{name} is still {value!r}; memory is estimated from a resolved ds_config.")
    return value


def _offload(section: OffloadOptimizer | OffloadParam | None) -> OffloadLayout:
    keys = section.model_dump() if section else {}
    return OffloadLayout(**{field.name: keys[field.name] for field in fields(OffloadLayout) if field.name in keys})
