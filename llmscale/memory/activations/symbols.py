"""What the size of a recorded tensor can depend on, and what decides which tensors there are. No torch.

A recording (llmscale/dry_run/record.py) holds for one branch of the model's code at every shape: its sizes are products
of the symbols below. Where a shape or a setting makes PyTorch run other operators, the branch is another one, and was
recorded by itself.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode, Precision

#: The kernel of F.scaled_dot_product_attention on an Ampere or newer GPU: FlashAttention-2 for 16 bit and heads of up
#: to 256, its copies padded to a multiple of 8 where the head is none; PyTorch's memory-efficient kernel for the rest,
#: and separate matrix products where that cannot (llmscale/dry_run/cuda_kernels.py).
AttentionKernel = Literal["flash", "flash_padded", "efficient", "math"]
#: bf16 and fp16 run the same operators on tensors of the same sizes.
PrecisionKind = Literal["fp32", "16bit", "autocast"]


@dataclass(frozen=True)
class BlockBranch:
    """What decides the operators of a block."""

    precision: PrecisionKind
    checkpointing: CheckpointingMode
    dropout: bool
    bias: bool
    saves_preactivation: bool
    """GELU's backward pass reads its input; ReLU's reads its result."""
    attention: AttentionKernel
    zero3_linear: bool
    """ZeRO-3 replaces F.linear by its own (deepspeed/runtime/zero/linear.py)."""

    @property
    def key(self) -> str:
        return branch_key(self)


@dataclass(frozen=True)
class EndsBranch:
    """What decides the operators before and behind the blocks: embeddings, final norm, output head and loss."""

    precision: PrecisionKind
    dropout: bool
    bias: bool
    zero3_linear: bool
    one_sequence: bool
    """Targets of a single sequence lie beside each other, and position gradients need no sum."""
    padded_vocabulary: bool
    """The loss reads a slice of the logits."""

    @property
    def key(self) -> str:
        return branch_key(self)


def branch_key(branch: BlockBranch | EndsBranch) -> str:
    """The name of a branch in a table."""
    return " ".join(str(value) for value in astuple(branch))


def block_branch(
    shape: GPTShape, precision: Precision, checkpointing: CheckpointingMode, zero_stage: int
) -> BlockBranch:
    """The branch that a block of this shape takes."""
    return BlockBranch(
        precision=_kind_of(precision),
        checkpointing=checkpointing,
        dropout=shape.dropout > 0,
        bias=shape.bias,
        saves_preactivation=shape.activation != "relu",
        attention=attention_kernel(shape.head_dim, precision),
        zero3_linear=zero_stage == 3,
    )


def ends_branch(shape: GPTShape, micro_batch_size: int, precision: Precision, zero_stage: int) -> EndsBranch:
    """The branch that embeddings and head take."""
    return EndsBranch(
        precision=_kind_of(precision),
        dropout=shape.dropout > 0,
        bias=shape.bias,
        zero3_linear=zero_stage == 3,
        one_sequence=micro_batch_size == 1,
        padded_vocabulary=shape.vocab_size != shape.padded_vocab_size,
    )


def attention_kernel(head_dim: int, precision: Precision) -> AttentionKernel:
    """Which kernel runs causal attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    is_16bit = precision != "fp32"
    if is_16bit and head_dim <= 256:
        return "flash_padded" if head_dim % 8 else "flash"
    return "math" if head_dim % (8 if is_16bit else 4) else "efficient"


def shape_symbols(shape: GPTShape, micro_batch_size: int) -> dict[str, int]:
    """Symbol -> number. The rounded ones are what kernels and the vocabulary's padding round to."""
    t, d = shape.seq_len, shape.head_dim
    return {
        "b": micro_batch_size,
        "t": t,
        "a": shape.n_head,
        "d": d,
        "V": shape.vocab_size,
        "padded_V": shape.padded_vocab_size,
        "t+1": t + 1,  # a sample has one token more than the model sees at once
        "d_to_8": _round_up(d, 8),  # FlashAttention's padding of a head
        "d_to_32_or_64": _round_up(d, 32 if d <= 128 else 64),  # its backward kernel's sum of dQ, with t in blocks
        "t_to_128": _round_up(t, 128),
        "t_to_32": _round_up(t, 32),  # the memory-efficient kernel's log-sum-exp
    }


#: Symbols of the vocabulary: what the head makes from the first of them on is the loss's.
VOCABULARY_SYMBOLS = frozenset({"V", "padded_V"})


def _kind_of(precision: Precision) -> PrecisionKind:
    kinds: dict[Precision, PrecisionKind] = {"fp32": "fp32", "bf16": "16bit", "fp16": "16bit", "autocast": "autocast"}
    return kinds[precision]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
