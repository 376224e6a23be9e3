"""How long the arithmetic of one micro-step takes on one GPU. No torch.

Nothing here was measured by us on a GPU. The model has three kinds of work per token,

    matrix products  (6 x 12 L h^2 + 6 V h) FLOPs at `matmul` of the peak rate,
    attention        12 L h s FLOPs (not halved for the causal mask) at `attention` of the peak rate,
    the rest         8 L h x ELEMENT_BYTES + V x LOGIT_BYTES through the GPU's memory: norms, GELU, residuals, loss,

and its constants, with `communication.SLOWDOWN`, are a least-squares fit, rounded, to the 209 published bf16 rows of
MosaicML's llm-foundry benchmark: A100 40 and 80 GB, H100, MPT 125M to 70B (GPT-3's shapes), 8 to 512 GPUs, sequences of
512 to 65,536, micro-batches of 4,096 tokens and more; PyTorch FSDP with Triton's FlashAttention 1, so that an H100 with
a newer attention is faster at long sequences than this says. tests/planning/test_throughput.py holds rows and error.

Blocks of other kinds are counted by the same formulas, h the width of all query heads in attention, the products as
wide as they are; rows to compare them with there are none. A sliding window and documents that do not see each other
save no time: with a mask, PyTorch's memory-efficient kernel computes every score, and masks it.

The loss in chunks (llmscale.model.loss) has the FLOPs of the rows' loss: three products, nothing is computed again. Of
its traffic nothing else is counted either, though by count it moves 18 bytes per logit and not 42, and passes once per
chunk over the sum of the head's gradient, 12 bytes an element in 16 bit: with chunks of 2,048 tokens both are as much
where n_embd is 4,096, and narrower models are a little faster than is said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode, Precision
from llmscale.config.hardware import GPU

#: Bytes that move through memory for every element that a block makes outside of matrix products, forward and backward,
#: with 16-bit activations. (Fitted: 430 per unit of n_embd, of which GPT's block makes 8.)
ELEMENT_BYTES = 430 / 8
#: Bytes per token and vocabulary entry: logits and loss, forward and backward. (Fitted.)
LOGIT_BYTES = 35
#: A backward pass takes two products for every one of the forward pass.
_PASSES = 3
#: A forward pass is a third of forward and backward: full recomputation repeats it.
_RECOMPUTED = 4 / 3
#: FLOPs per byte of an A100 80 GB; a GPU of unknown memory bandwidth is taken to be as balanced.
_A100_BALANCE = 312e12 / 2.039e12


@dataclass(frozen=True)
class KernelEfficiency:
    """Fractions of the peak rate that two kinds of kernels reach."""

    matmul: float
    attention: float
    source: str
    """What it was fitted to, or whose it is assumed to be."""


_A100 = KernelEfficiency(0.88, 0.55, "A100 rows of llm-foundry")
_H100 = KernelEfficiency(0.755, 0.315, "H100 rows of llm-foundry")
_CALIBRATED = {"a100-40gb": _A100, "a100-80gb": _A100, "h100-80gb": _H100}
#: GPUs as fast as an H100 or faster are as hard to keep busy; the A100's fractions would flatter them.
_LIKE_H100 = {"h100-80gb-pcie", "h200", "b200"}


def kernel_efficiency(gpu: GPU) -> KernelEfficiency:
    """The fit for this GPU, or the nearest GPU's, and it says so."""
    if gpu.name in _CALIBRATED:
        return _CALIBRATED[gpu.name]
    like, name = (_H100, "H100") if gpu.name in _LIKE_H100 else (_A100, "A100")
    text = f"not calibrated: assumes {name}'s efficiency"
    if gpu.memory_bytes_per_s is None:
        text += ", and memory as fast for its arithmetic as A100's"
    return KernelEfficiency(like.matmul, like.attention, text)


def memory_bytes_per_s(gpu: GPU) -> float:
    """The GPU's memory bandwidth, or an A100's share of its arithmetic rate where it is not known."""
    return gpu.memory_bytes_per_s or gpu.dense_16bit_flops / _A100_BALANCE


def peak_flops(gpu: GPU, precision: Precision) -> float | None:
    """FLOP/s that a run in this precision is measured against; None: the GPU's fp32 rate is not in the table."""
    return gpu.fp32_flops if precision == "fp32" else gpu.dense_16bit_flops


@dataclass(frozen=True)
class TokenWork:
    """Of one token's forward and backward pass, recomputation included."""

    matmul_flops: float
    attention_flops: float
    moved_bytes: float


def token_work(shape: GPTShape, precision: Precision, checkpointing: CheckpointingMode) -> TokenWork:
    """The three kinds of work that the model above times."""
    model = shape.architecture
    # `selective` keeps the results of matrix products and of attention and recomputes what lies between.
    again = _RECOMPUTED if checkpointing == "full" else 1.0
    again_between = 1.0 if checkpointing == "none" else _RECOMPUTED
    of_blocks, of_head = model.blocks_work, model.head.work
    moved_bytes = ELEMENT_BYTES * of_blocks.elementwise * again_between + LOGIT_BYTES * of_head.elementwise
    return TokenWork(
        matmul_flops=_PASSES * of_blocks.matmul_flops * again + _PASSES * of_head.matmul_flops,
        attention_flops=_PASSES * of_blocks.attention_flops * shape.seq_len * again,
        moved_bytes=moved_bytes * (2 if precision == "fp32" else 1),
    )


def estimate_compute_s(
    shape: GPTShape, micro_batch_size: int, precision: Precision, checkpointing: CheckpointingMode, gpu: GPU
) -> float | None:
    """Seconds of one forward and backward pass of a micro-batch on one GPU, recomputation included.

    None when the GPU's rate in this precision is not known.
    """
    peak = peak_flops(gpu, precision)
    if peak is None:
        return None
    efficiency, work = kernel_efficiency(gpu), token_work(shape, precision, checkpointing)
    per_token_s = (
        work.matmul_flops / (peak * efficiency.matmul)
        + work.attention_flops / (peak * efficiency.attention)
        + work.moved_bytes / memory_bytes_per_s(gpu)
    )
    return per_token_s * micro_batch_size * shape.seq_len
