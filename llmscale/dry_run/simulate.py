"""The simulation: DeepSpeed's engine around any module on fake tensors, and the memory that a step allocates.

Nothing is estimated: DeepSpeed's code runs line by line as rank 0 of any number of ranks, and every storage is followed
from its allocation to its release. Not simulated: memory that waits for another CUDA stream, the CUDA context and
NCCL's buffers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.dry_run.simulated_gpu import (
    GPU,
    cuda_kernels,
    fake_gpu,
    fake_tensors_move,
    fake_world,
    kernel_workspace,
)
from llmscale.dry_run.tracker import Category, MemoryTracker
from llmscale.engine.deepspeed_engine import release_engine
from llmscale.engine.zero_layout import inner_optimizer
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import Breakdown

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Simulated optimizer steps; the last one is measured. ZeRO-3 records the order of the modules in the first micro-step
#: and prefetches parameters by it later.
_STEPS = 2

#: Simulated micro-steps of an optimizer step, at most: the first one allocates buffers and the last one prepares the
#: step. Those between allocate nothing else.
MOST_MICRO_STEPS = 2

_PARAMETERS = Category.PARAMETERS
_GRADIENTS = Category.GRADIENTS
_BUCKETS = Category.BUCKETS
_TEMPORARIES = Category.TEMPORARIES

#: Category of the memory that a function of DeepSpeed 0.19.8 or of ours allocates. The innermost function on the stack
#: counts; without one the phase decides.
_CATEGORIES: dict[tuple[str, str], Category] = {
    # deepspeed/runtime/zero/stage_1_and_2.py
    ("stage_1_and_2.py", "setup_buckets"): _BUCKETS,
    ("stage_1_and_2.py", "allreduce_bucket"): _BUCKETS,
    ("stage_1_and_2.py", "gradient_reduction_w_predivide"): _BUCKETS,
    ("stage_1_and_2.py", "copy_grads_in_partition"): _GRADIENTS,
    ("stage_1_and_2.py", "_build_compact_grad_partition_buffer"): _GRADIENTS,
    ("stage_1_and_2.py", "_fill_param_grad_accum_attribute"): _GRADIENTS,
    ("stage_1_and_2.py", "get_all_grad_tensors"): _GRADIENTS,
    ("stage_1_and_2.py", "get_flat_partition"): _GRADIENTS,
    ("stage_1_and_2.py", "_get_flat_partition_unpadded"): _GRADIENTS,
    # deepspeed/runtime/zero/stage3.py and partition_parameters.py
    ("stage3.py", "setup_buckets"): _BUCKETS,
    ("stage3.py", "__avg_scatter_grads"): _BUCKETS,
    ("stage3.py", "__avg_scatter_contiguous_grads"): _BUCKETS,
    ("stage3.py", "_partitioned_buffers_all_gather"): _BUCKETS,
    ("stage3.py", "partition_grads"): _GRADIENTS,
    ("coalesced_collectives.py", "reduce_scatter_coalesced"): _BUCKETS,
    ("partition_parameters.py", "all_gather_coalesced"): _PARAMETERS,
    ("partition_parameters.py", "wait"): _PARAMETERS,
    ("partition_parameters.py", "_partition_param_sec"): _PARAMETERS,
    # deepspeed/runtime/engine.py: stage 0
    ("engine.py", "allreduce_bucket"): _BUCKETS,
    ("engine.py", "buffered_allreduce_fallback"): _BUCKETS,
    ("utils.py", "all_gather_dp_groups"): _BUCKETS,
    # llmscale/engine/deepspeed_patches.py: stage 0 in bf16
    ("deepspeed_patches.py", "add"): _GRADIENTS,
    ("deepspeed_patches.py", "hand_over"): _GRADIENTS,
    ("loss.py", "forward"): Category.LOGITS,
    ("adam.py", "_init_group"): Category.OPTIMIZER,
    ("optimizers.py", "_momentum_of"): Category.OPTIMIZER,
    ("checkpointing.py", "backward"): Category.ACTIVATIONS,
}


@dataclass
class Attribution:
    """Finds a new storage's category by its caller and its shape."""

    tables: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of tied embeddings."""
    logits: set[int] = field(default_factory=set)
    """Sizes of the last dimension of logits."""

    def category_of(
        self, tensor: Tensor, operator: torch._ops.OpOverload, arguments: tuple[object, ...]
    ) -> Category | None:
        """Return the category of the storage that is being allocated; None if unknown."""
        frame: FrameType | None = sys._getframe(1)
        in_backward = False
        while frame is not None:
            code = frame.f_code
            category = _CATEGORIES.get((code.co_filename.rpartition("/")[2], code.co_name))
            if category is not None:
                return category
            in_backward |= code.co_name == "_engine_run_backward"
            frame = frame.f_back
        if in_backward and tensor.shape in self.tables:
            # The tied embedding's gradient from the head, which waits for that of the lookup.
            return Category.GRADIENTS
        if tensor.dim() > 1 and tensor.shape[-1] in self.logits:
            return Category.LOGITS
        return None


@dataclass(frozen=True)
class DryRun:
    """Live bytes of rank 0 in the last simulated step."""

    resident: Breakdown
    """Bytes between steps."""
    forward: Breakdown
    """Bytes at the peak of the forward passes."""
    backward: Breakdown
    """Bytes at the peak of the backward passes."""
    step: Breakdown
    """Bytes at the peak of the optimizer step."""
    states: dict[str, Breakdown]
    """Peaks without activations and logits, by phase: forward, backward, step."""
    host_bytes: int
    """Bytes of this rank in host memory between steps."""
    num_parameters: int
    """Parameters of the module, on all ranks together."""
    seconds: float
    """Seconds of the simulation."""


@dataclass(frozen=True)
class Simulation:
    """Settings of a simulation."""

    world_size: int
    micro_steps: int
    """Micro-steps of an optimizer step; more than MOST_MICRO_STEPS change nothing."""
    attribution: Attribution
    capability: ComputeCapability | None = None
    """Compute capability of the GPU; None for Ampere or newer."""
    number_elsewhere: float = 1.0
    """Value of every floating-point number that the engine reads from host memory."""


def simulate(
    build: Callable[[], DeepSpeedEngine],
    forward: Callable[[DeepSpeedEngine], Tensor],
    simulation: Simulation,
    patches: Iterable[AbstractContextManager[object]] = (),
) -> DryRun:
    """Simulate optimizer steps of the engine that `build` makes, as rank 0; `forward` returns a micro-batch's loss.

    `patches` are entered last and left first. Raises ConfigError in a process that is part of a job.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_only_new_garbage())
        tracker = _enter_simulation(stack, simulation)
        for patch in patches:
            stack.enter_context(patch)
        with tracker.phase("build", Category.OPTIMIZER):
            engine = build()
        _label(engine, tracker)
        _watch_gradients(engine, tracker)
        gc.collect()
        for _ in range(_STEPS):
            tracker.restart()
            _train_step(engine, tracker, forward, simulation.micro_steps)
            _label(engine, tracker)
            gc.collect()
        result = _measure(tracker, engine, time.perf_counter() - start)
        release_engine(engine)
    return result


def refuse_nvme(ds_config: Mapping[str, object]) -> None:
    """Raise ConfigError for offload to NVMe."""
    if '"device": "nvme"' in json.dumps(ds_config):
        raise ConfigError(
            "a dry run cannot simulate offload to NVMe, whose buffers are filled from files. Without --dry-run it is "
            'estimated; with "device": "cpu" it is simulated.'
        )


@contextlib.contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Let garbage collections pass over what exists already: a process with DeepSpeed has a million objects."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _enter_simulation(stack: contextlib.ExitStack, simulation: Simulation) -> MemoryTracker:
    """Enter all patches in order. Leaving the stack restores everything."""
    stack.enter_context(fake_gpu())
    stack.enter_context(fake_world(simulation.world_size))
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    stack.enter_context(fake_tensors_move())
    stack.enter_context(cuda_kernels(simulation.capability))
    return stack.enter_context(
        MemoryTracker(
            device=GPU,
            classify=simulation.attribution.category_of,
            workspace=kernel_workspace,
            number_elsewhere=simulation.number_elsewhere,
        )
    )


def _train_step(
    engine: DeepSpeedEngine,
    tracker: MemoryTracker,
    forward: Callable[[DeepSpeedEngine], Tensor],
    micro_steps: int,
) -> None:
    """Train a step like `llmscale.engine.train_step.train_step`, phase by phase."""
    total = torch.zeros((), device=GPU)
    for _ in range(micro_steps):
        with tracker.phase("forward", Category.ACTIVATIONS):
            loss = forward(engine)
        with tracker.phase("backward", Category.TEMPORARIES):
            engine.backward(loss)
            total += loss.detach()
        with tracker.phase("step", Category.TEMPORARIES):
            engine.step()


def _label(engine: DeepSpeedEngine, tracker: MemoryTracker) -> None:
    """Assign categories to the tensors that DeepSpeed keeps between steps."""
    zero = engine.optimizer
    parameters = list(engine.module.parameters())
    states = inner_optimizer(engine).state.values()
    by_category = {
        Category.OPTIMIZER: [value for state in states for value in state.values()],
        Category.PARAMETERS: [
            *parameters,
            *engine.module.buffers(),
            *(getattr(parameter, "ds_tensor", None) for parameter in parameters),
        ],
        Category.GRADIENTS: [
            getattr(zero, "grad_partitions_flat_buffer", None),
            *getattr(zero, "fp32_groups_gradients_flat", []),
        ],
        Category.BUCKETS: [
            getattr(zero, "temp_grad_buffer_for_gpu_offload", None),
            *(getattr(bucket, "buffer", None) for bucket in getattr(zero, "ipg_buckets", {}).values()),
        ],
    }
    for category, tensors in by_category.items():
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.device == GPU]
        tracker.assign([tensor for tensor in on_gpu if tensor.numel()], category)


def _watch_gradients(engine: DeepSpeedEngine, tracker: MemoryTracker) -> None:
    """Label each parameter's gradient as soon as autograd completes it, before DeepSpeed's hook releases it."""
    for parameter in (parameter for parameter in engine.module.parameters() if parameter.requires_grad):

        def label(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                tracker.assign([parameter.grad], Category.GRADIENTS)

        hooks = parameter._post_accumulate_grad_hooks or {}
        theirs = dict(hooks)
        hooks.clear()
        parameter.register_post_accumulate_grad_hook(label)
        hooks.update(theirs)


def _measure(tracker: MemoryTracker, engine: DeepSpeedEngine, seconds: float) -> DryRun:
    peaks = tracker.peaks()
    states = tracker.peaks(Category.ACTIVATIONS, Category.LOGITS)
    return DryRun(
        resident=tracker.live,
        forward=peaks["forward"],
        backward=peaks["backward"],
        step=peaks["step"],
        states={name: states[name] for name in ("forward", "backward", "step")},
        host_bytes=tracker.elsewhere_bytes,
        num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        seconds=seconds,
    )
