"""Every branch of llmscale.model.gpt, traced at small shapes: what `scripts/record_memory.py` makes its table of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import Activation, GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode, Precision
from llmscale.dry_run.factor import factor_traces
from llmscale.dry_run.record import MicroStepTrace, trace_micro_step
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.memory.activations.recorded import RecordedSegment
from llmscale.memory.activations.symbols import AttentionKernel, BlockBranch, EndsBranch, PrecisionKind, shape_symbols
from llmscale.model.gpt import GPT

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}
_PRECISIONS: dict[PrecisionKind, Precision] = {"fp32": "fp32", "16bit": "bf16", "autocast": "autocast"}
_MODES: tuple[CheckpointingMode, ...] = ("none", "selective", "full")

#: (sequences, tokens, heads, a number that head_dim is made of, vocabulary): no two products of symbols grow alike from
#: one to the next. t is no multiple of 32, and t and d rounded up to what kernels round to have other ratios.
_SHAPES = ((2, 37, 3, 13, 300), (3, 150, 5, 5, 389), (7, 290, 2, 17, 1000))
#: Two, so that a block is seen to allocate what the one before did.
_LAYERS = 2


def all_block_branches() -> Iterator[BlockBranch]:
    """Every branch that a block of a GPT can take."""
    kernels: dict[PrecisionKind, tuple[AttentionKernel, ...]] = {
        "fp32": ("efficient", "math"),
        "16bit": ("flash", "flash_padded", "efficient", "math"),
        "autocast": ("flash", "flash_padded", "efficient", "math"),
    }
    both = (False, True)
    for precision, mode, dropout, bias, saves, zero3 in itertools.product(kernels, _MODES, both, both, both, both):
        for kernel in kernels[precision]:
            yield BlockBranch(precision, mode, dropout, bias, saves, kernel, zero3)


def all_ends_branches() -> Iterator[EndsBranch]:
    """Every branch that embeddings and head of a GPT can take."""
    both = (False, True)
    for precision in _PRECISIONS:
        for switches in itertools.product(both, both, both, both, both):
            yield EndsBranch(precision, *switches)


def record_blocks(branch: BlockBranch) -> dict[str, RecordedSegment]:
    """Record one branch of the blocks. Within `fake_world`. Raises ValueError as `factor_traces`."""
    activation: Activation = "gelu" if branch.saves_preactivation else "relu"
    shapes = [
        GPTShape(
            _LAYERS,
            n_head,
            n_head * _head_dim(number, branch.attention, branch.precision),
            vocab_size,
            seq_len,
            activation=activation,
            dropout=0.1 if branch.dropout else 0.0,
            bias=branch.bias,
        )
        for _, seq_len, n_head, number, vocab_size in _SHAPES
    ]
    micro_batches = [sequences for sequences, *_ in _SHAPES]
    return _record(shapes, micro_batches, branch.precision, branch.checkpointing, branch.zero3_linear)


def record_ends(branch: EndsBranch) -> dict[str, RecordedSegment]:
    """Record one branch of embeddings and head. Within `fake_world`. Raises ValueError as `factor_traces`."""
    kernel: AttentionKernel = "efficient" if branch.precision == "fp32" else "flash"
    shapes = [
        GPTShape(
            _LAYERS,
            n_head,
            n_head * _head_dim(number, kernel, branch.precision),
            vocab_size if branch.padded_vocabulary else -(-vocab_size // 128) * 128,
            seq_len,
            dropout=0.1 if branch.dropout else 0.0,
            bias=branch.bias,
        )
        for _, seq_len, n_head, number, vocab_size in _SHAPES
    ]
    micro_batches = [1 if branch.one_sequence else sequences for sequences, *_ in _SHAPES]
    return _record(shapes, micro_batches, branch.precision, "none", branch.zero3_linear)


def trace_gpt(
    shape: GPTShape, micro_batch_size: int, precision: Precision, checkpointing: CheckpointingMode, zero_stage: int
) -> MicroStepTrace:
    """One micro-step of a GPT. Within `fake_world`, because DeepSpeed's checkpointing asks for its rank."""

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(micro_batch_size, shape.seq_len + 1, dtype=torch.long)
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return loss

    return trace_micro_step(
        lambda run_block: GPT(shape, seed=0, checkpoint=run_block),
        loss_of,
        n_layer=shape.n_layer,
        dtype=_DTYPES[precision],
        autocast=precision == "autocast",
        checkpoint=build_block_checkpoint(checkpointing, {}),
        patches=[_zero3_linear] if zero_stage == 3 else [],
        used_twice=["wte.weight"],
    )


def _record(
    shapes: list[GPTShape],
    micro_batches: list[int],
    precision: PrecisionKind,
    checkpointing: CheckpointingMode,
    zero3_linear: bool,
) -> dict[str, RecordedSegment]:
    cases = list(zip(shapes, micro_batches, strict=True))
    stage = 3 if zero3_linear else 0
    traces = [trace_gpt(shape, size, _PRECISIONS[precision], checkpointing, stage) for shape, size in cases]
    return factor_traces(traces, [shape_symbols(shape, size) for shape, size in cases])


def _head_dim(number: int, kernel: AttentionKernel, precision: PrecisionKind) -> int:
    """A head that this kernel takes, made of an odd number (llmscale.memory.activations.symbols.attention_kernel)."""
    if kernel == "flash":
        return 8 * number
    if kernel == "flash_padded":
        return 2 * number + 1
    if precision == "fp32":
        return 4 * number if kernel == "efficient" else 2 * number + 1
    return 256 + (8 * number if kernel == "efficient" else 2 * number + 1)


def _zero3_linear() -> AbstractContextManager[object]:
    """`F.linear` as `deepspeed.zero.Init` replaces it at stage 3."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return mock.patch.object(F, "linear", zero3_linear_wrap)
