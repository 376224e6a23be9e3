"""Speeds of a GPU's kernels, and their sources. No torch.

Nothing was measured by us on a GPU. Matrix products and attention by FlashAttention 1 reach a share of the peak rate
that was fitted to llm-foundry's rows (llmscale.planning.step_time), which ran Triton's FlashAttention 1. llmscale's
attention is PyTorch's FlashAttention-2, with the speed of its paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from llmscale.architecture.attention_kernels import training_kernel
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import GPU, get_gpu
from llmscale.config.loss_settings import CHUNK_TOKENS

#: Memory traffic in bytes per element that an eager block makes outside matrix products, forward and backward, with
#: 16-bit activations. (Fitted: 392 per unit of n_embd, of which GPT's block makes 8.)
_EAGER_ELEMENT_BYTES = 392 / 8
#: Bytes of these that a block compiled by inductor saves. torchtitan's Llama 3 8B in bf16 took 173.5 us a token eagerly
#: and 150.0 compiled on 8 H100s, 178.4 and 153.5 on 128 (benchmarks/llama3_h100_202412_torchtitan.md, batch 2,
#: selective recomputation, GPUs of 2.4 TB/s): 58 MB for 1.606M elements, 4/3 of them with recomputation.
_COMPILED_SAVES_BYTES = 27
#: Bytes per token and vocabulary entry of complete logits and their loss. (Fitted; by count 42.)
_WHOLE_LOGIT_BYTES = 38
#: Bytes per token and vocabulary entry in chunks, by count: logits in 16 bit and fp32, and their gradient in 16 bit,
#: written and read.
_CHUNK_LOGIT_BYTES = 18
#: Bytes per element of the head and chunk: the chunk's product in 16 bit, the sum in fp32, read and written.
_CHUNK_HEAD_BYTES = 12

#: TFLOP/s of causal attention by head and context, forward and backward (Dao 2023, arXiv 2307.08691, figures 4 and 7, c
#: and d).
_FLASH_2_TFLOPS = {
    "A100": {
        64: {512: 88, 1024: 119, 2048: 140, 4096: 158, 8192: 165, 16384: 171},
        128: {512: 99, 1024: 131, 2048: 155, 4096: 182, 8192: 189, 16384: 189},
    },
    "H100": {
        64: {512: 141, 1024: 192, 2048: 232, 4096: 257, 8192: 273, 16384: 284},
        128: {512: 163, 1024: 221, 2048: 265, 4096: 294, 8192: 308, 16384: 328},
    },
}
#: The paper counts half of the products, in 3.5 forward passes; here all are counted, in three.
_FULL_PER_CAUSAL = 2 * 3 / 3.5
#: FlexAttention's rate relative to FlashAttention-2's: 90 % in the forward pass, 85 % in 2.5 backward ones (PyTorch's
#: blog, FlexAttention, August 2024; not measured by us). It skips blocks of positions of this size.
_FLEX_SHARE = 3.5 / (1 / 0.9 + 2.5 / 0.85)
_FLEX_BLOCK = 128
#: Peaks of the paper's GPUs.
_PEAK_TFLOPS = {
    like: get_gpu(name).dense_16bit_flops / 1e12 for like, name in (("A100", "a100-80gb"), ("H100", "h100-80gb"))
}
#: GPUs as fast as an H100, which are as hard to keep busy: the A100's fractions would be too high.
_LIKE_H100 = {"h100-80gb", "h100-80gb-pcie", "h200", "b200"}


@dataclass(frozen=True)
class KernelSettings:
    """Software of a model's arithmetic; the defaults are llmscale's."""

    attention: Literal["flash-1", "flash-2"] = "flash-2"
    compiled_blocks: bool = False
    loss_chunk_tokens: int | None = CHUNK_TOKENS
    """Tokens per chunk of the loss; None for all logits at once."""

    @property
    def element_bytes(self) -> float:
        """Return the memory traffic per element of a block, forward and backward, in 16 bit."""
        return _EAGER_ELEMENT_BYTES - (_COMPILED_SAVES_BYTES if self.compiled_blocks else 0)

    def logit_bytes(self, n_embd: int, tokens: int) -> float:
        """Return the memory traffic per logit of a micro-batch of `tokens`.

        The loss in chunks moves less, but reads and writes the sum of the head's gradient once per chunk: with chunks
        of 2,048 tokens that equals the unchunked count, 42, at n_embd 4,096.
        """
        if self.loss_chunk_tokens is None:
            return _WHOLE_LOGIT_BYTES
        if tokens <= self.loss_chunk_tokens:
            return _CHUNK_LOGIT_BYTES
        return _CHUNK_LOGIT_BYTES + _CHUNK_HEAD_BYTES * n_embd / self.loss_chunk_tokens


@dataclass(frozen=True)
class KernelEfficiency:
    """Fractions of the peak rate that kernels reach."""

    like: Literal["A100", "H100"]
    matmul: float
    flash_1: float
    """Fraction of FlashAttention 1, with all products counted and not the causal half."""

    def attention(
        self,
        kernels: KernelSettings,
        shape: GPTShape,
        precision: Precision,
        gpu: GPU,
        checkpointing: CheckpointingMode = "none",
    ) -> float:
        """Return the fraction of attention, with all products counted and not the causal half.

        Without FlashAttention (a dense mask, fp32, an old GPU) PyTorch's memory-efficient kernel is about as fast as
        FlashAttention 1 (Dao 2023, figure 4). FlexAttention skips what a window hides; documents, whose lengths are
        unknown, are assumed to fill the sequence.
        """
        kernel = training_kernel(
            shape, is_16bit=precision != "fp32", checkpointing=checkpointing, capability=gpu.capability
        )
        if kernels.attention == "flash-1" or not kernel.startswith("fl"):
            return self.flash_1
        head_dim = 64 if shape.head_dim < 96 else 128
        rates = _FLASH_2_TFLOPS[self.like][head_dim]
        share = _interpolate(rates, shape.seq_len) * _FULL_PER_CAUSAL / _PEAK_TFLOPS[self.like]
        if kernel == "flex":
            return share * _FLEX_SHARE / _visible_share(shape)
        return share


def _visible_share(shape: GPTShape) -> float:
    """Return the share of causal attention's blocks that windows leave, as a mean over the layers."""
    t = shape.seq_len
    if shape.has_window:
        seen = min(1.0, (shape.sliding_window + _FLEX_BLOCK) / t)
    else:
        seen = 1.0
    return (shape.global_layers + (shape.n_layer - shape.global_layers) * seen * (2 - seen)) / shape.n_layer


def _interpolate(rates: dict[int, int], seq_len: int) -> float:
    """Interpolate by the logarithm of the context, with the nearest value outside."""
    lengths = sorted(rates)
    for below, above in pairwise(lengths):
        if below <= seq_len <= above:
            share = math.log2(seq_len / below) / math.log2(above / below)
            return rates[below] + share * (rates[above] - rates[below])
    return rates[lengths[0] if seq_len < lengths[0] else lengths[-1]]


_A100 = KernelEfficiency("A100", 0.86, 0.55)
_H100 = KernelEfficiency("H100", 0.74, 0.315)


def kernel_efficiency(gpu: GPU) -> KernelEfficiency:
    """Return the fit of this GPU, or the nearest GPU's."""
    return _H100 if gpu.name in _LIKE_H100 else _A100


def memory_bytes_per_s(gpu: GPU) -> float:
    """Return the GPU's memory bandwidth; if unknown, an A100 80 GB's scaled by the arithmetic rate."""
    if gpu.memory_bytes_per_s:
        return gpu.memory_bytes_per_s
    a100 = get_gpu("a100-80gb")
    assert a100.memory_bytes_per_s is not None
    return a100.memory_bytes_per_s * gpu.dense_16bit_flops / a100.dense_16bit_flops
