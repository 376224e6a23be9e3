"""How long the arithmetic of one micro-step takes on one GPU. No torch.

Nothing here was measured by us on a GPU. The model has three kinds of work per token,

    matrix products  (6 x 12 L h^2 + 6 V h) FLOPs at a share of the peak rate,
    attention        12 L h s FLOPs (not halved for the causal mask) at another one,
    the rest         8 L h x element bytes + V x logit bytes through the GPU's memory: norms, GELU, residuals, loss,

whose speeds are llmscale.planning.kernels'. Its constants, with those of llmscale.planning.communication_time, are a
least-squares fit, rounded, to the 209 published bf16 rows of MosaicML's llm-foundry benchmark: A100 40 and 80 GB, H100,
MPT 125M to 70B (GPT-3's shapes), 8 to 512 GPUs, sequences of 512 to 65,536, micro-batches of 4,096 tokens and more;
PyTorch FSDP with Triton's FlashAttention 1. tests/planning/test_throughput.py holds rows and error.

Blocks of other kinds are counted by the same formulas, h the width of all query heads in attention, the products as
wide as they are: tests/planning/published_runs.py compares Llama's. A sliding window and documents that do not see each
other save no time: with a mask, PyTorch's memory-efficient kernel computes every score, and masks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import GPU
from llmscale.planning.kernels import Kernels, kernel_efficiency, memory_bytes_per_s

#: A backward pass takes two products for every one of the forward pass.
_PASSES = 3
#: A forward pass is a third of forward and backward: full recomputation repeats it.
_RECOMPUTED = 4 / 3
#: What train.py runs when nothing else is said.
OWN_KERNELS = Kernels()


def peak_flops(gpu: GPU, precision: Precision) -> float | None:
    """FLOP/s that a run in this precision is measured against; None: the GPU's fp32 rate is not in the table."""
    return gpu.fp32_flops if precision == "fp32" else gpu.dense_16bit_flops


@dataclass(frozen=True)
class TokenWork:
    """Of one token's forward and backward pass, recomputation included."""

    matmul_flops: float
    attention_flops: float
    block_bytes: float
    """Moved through memory by the blocks' norms, activations and residuals."""
    head_bytes: float
    """And by the loss."""

    @property
    def moved_bytes(self) -> float:
        return self.block_bytes + self.head_bytes


@dataclass(frozen=True)
class ComputeParts:
    """Seconds of one forward and backward pass of a micro-batch."""

    matmul_s: float
    attention_s: float
    block_traffic_s: float
    """Norms, activations, residuals."""
    loss_s: float
    """Without its matrix products."""

    @property
    def total_s(self) -> float:
        return self.matmul_s + self.attention_s + self.block_traffic_s + self.loss_s


def token_work(
    shape: GPTShape, tokens: int, precision: Precision, checkpointing: CheckpointingMode, kernels: Kernels
) -> TokenWork:
    """The three kinds of work that the model above times, in a micro-batch of `tokens`."""
    model = shape.architecture
    # `selective` keeps the results of matrix products and of attention and recomputes what lies between.
    again = _RECOMPUTED if checkpointing == "full" else 1.0
    again_between = 1.0 if checkpointing == "none" else _RECOMPUTED
    of_blocks, of_head = model.blocks_work, model.head.work
    wide = 2 if precision == "fp32" else 1
    return TokenWork(
        matmul_flops=_PASSES * of_blocks.matmul_flops * again + _PASSES * of_head.matmul_flops,
        attention_flops=_PASSES * of_blocks.attention_flops * shape.seq_len * again,
        block_bytes=wide * kernels.element_bytes * of_blocks.elementwise * again_between,
        head_bytes=wide * kernels.logit_bytes(shape.n_embd, tokens) * of_head.elementwise,
    )


def estimate_compute_s(
    shape: GPTShape,
    micro_batch_size: int,
    precision: Precision,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    kernels: Kernels = OWN_KERNELS,
) -> float | None:
    """Seconds of one forward and backward pass of a micro-batch on one GPU, recomputation included.

    None when the GPU's rate in this precision is not known.
    """
    parts = compute_parts(shape, micro_batch_size, precision, checkpointing, gpu, kernels)
    return None if parts is None else parts.total_s


def compute_parts(
    shape: GPTShape,
    micro_batch_size: int,
    precision: Precision,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    kernels: Kernels = OWN_KERNELS,
) -> ComputeParts | None:
    """The same by kind of work."""
    peak = peak_flops(gpu, precision)
    if peak is None:
        return None
    efficiency, tokens = kernel_efficiency(gpu), micro_batch_size * shape.seq_len
    work = token_work(shape, tokens, precision, checkpointing, kernels)
    return ComputeParts(
        matmul_s=tokens * work.matmul_flops / (peak * efficiency.matmul),
        attention_s=tokens * work.attention_flops / (peak * efficiency.attention(kernels, shape, precision, gpu)),
        block_traffic_s=tokens * work.block_bytes / memory_bytes_per_s(gpu),
        loss_s=tokens * work.head_bytes / memory_bytes_per_s(gpu),
    )
