"""What memory is for, told by the function that allocated it."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

from llmscale.architecture.shape import GPTShape
from llmscale.dry_run.tracker import Category

_PARAMETERS, _GRADIENTS = Category.PARAMETERS, Category.GRADIENTS
_BUCKETS, _TEMPORARIES = Category.BUCKETS, Category.TEMPORARIES

#: Function of DeepSpeed 0.19.8 or of ours -> what it allocates; the innermost one on the stack counts. Where none is on
#: the stack, the phase decides.
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


class Attribution:
    """Tells a new storage's category from its caller and its shape."""

    def __init__(self, shape: GPTShape) -> None:
        self._table = shape.architecture.token_embedding.shape
        self._logits = {shape.vocab_size, shape.padded_vocab_size}

    def category_of(
        self, tensor: Tensor, operator: torch._ops.OpOverload, arguments: tuple[object, ...]
    ) -> Category | None:
        """The category of the storage that is being made right now; None where nothing tells."""
        frame: FrameType | None = sys._getframe(1)
        in_backward = False
        while frame is not None:
            code = frame.f_code
            category = _CATEGORIES.get((code.co_filename.rpartition("/")[2], code.co_name))
            if category is not None:
                return category
            in_backward |= code.co_name == "_engine_run_backward"
            frame = frame.f_back
        if in_backward and tensor.shape == self._table:
            # The tied embedding's gradient from the head, which waits for the one from the look-up.
            return Category.GRADIENTS
        if tensor.dim() > 1 and tensor.shape[-1] in self._logits:
            return Category.LOGITS
        return None
