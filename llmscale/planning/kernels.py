"""How fast a GPU's kernels are, and what their speeds were fitted to, counted by or read from. No torch.

Nothing here was measured by us on a GPU. Matrix products, and attention by FlashAttention 1, reach a share of the
peak rate that was fitted to llm-foundry's rows (llmscale.planning.compute_time), whose attention was Triton's
FlashAttention 1. llmscale's own attention is PyTorch's, which is FlashAttention-2: its speed is its paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from llmscale.architecture.attention_kernels import attention_kernel
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.hardware import GPU, get_gpu
from llmscale.config.loss_settings import CHUNK_TOKENS

#: Bytes that move through memory for every element that an eager block makes outside of matrix products, forward and
#: backward, with 16-bit activations. (Fitted: 392 per unit of n_embd, of which GPT's block makes 8.)
_EAGER_ELEMENT_BYTES = 392 / 8
#: How many of them a block compiled by inductor saves. torchtitan's Llama 3 8B in bf16 took 173.5 us a token eagerly
#: and 150.0 compiled on 8 H100s, 178.4 and 153.5 on 128 (benchmarks/llama3_h100_202412_torchtitan.md, batch 2,
#: selective recomputation, GPUs of 2.4 TB/s): 58 MB of the 1.606M elements, 4/3 of them with what is recomputed.
_COMPILED_SAVES_BYTES = 27
#: Bytes per token and vocabulary entry of logits that are held as a whole, and their loss. (Fitted; by count 42.)
_WHOLE_LOGIT_BYTES = 38
#: The same in chunks, by count: logits in 16 bit and in fp32, and their gradient in 16 bit, written and read.
_CHUNK_LOGIT_BYTES = 18
#: For every element of the head, once a chunk: the chunk's product in 16 bit, the sum in fp32, read and written.
_CHUNK_HEAD_BYTES = 12

#: Context -> TFLOP/s of causal attention, forward and backward (Dao 2023, arXiv 2307.08691, figures 4 and 7, c and d),
#: for heads of 64 and 128.
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
#: The paper counts half of the products, and 3.5 forward passes of them for forward and backward; here all are counted,
#: three times.
_FULL_PER_CAUSAL = 2 * 3 / 3.5
#: The GPUs that the paper measured on.
_PEAK_TFLOPS = {
    like: get_gpu(name).dense_16bit_flops / 1e12 for like, name in (("A100", "a100-80gb"), ("H100", "h100-80gb"))
}


@dataclass(frozen=True)
class Kernels:
    """The software that runs a model's arithmetic; the defaults are llmscale's own."""

    attention: Literal["flash-1", "flash-2"] = "flash-2"
    compiled_blocks: bool = False
    loss_chunk_tokens: int | None = CHUNK_TOKENS
    """None: logits of all tokens at once, the loss run eagerly."""

    @property
    def element_bytes(self) -> float:
        """Memory traffic for every element of a block, forward and backward, in 16 bit."""
        return _EAGER_ELEMENT_BYTES - (_COMPILED_SAVES_BYTES if self.compiled_blocks else 0)

    def logit_bytes(self, n_embd: int, tokens: int) -> float:
        """The same for every logit, of a micro-batch of so many tokens.

        The loss in chunks (llmscale.model.loss) computes nothing twice and moves less, but passes over the sum of the
        head's gradient once per chunk: with chunks of 2,048 tokens it all comes to the whole loss's count, 42, where
        n_embd is 4,096.
        """
        if self.loss_chunk_tokens is None:
            return _WHOLE_LOGIT_BYTES
        if tokens <= self.loss_chunk_tokens:
            return _CHUNK_LOGIT_BYTES
        return _CHUNK_LOGIT_BYTES + _CHUNK_HEAD_BYTES * n_embd / self.loss_chunk_tokens


@dataclass(frozen=True)
class KernelEfficiency:
    """Fractions of the peak rate that two kinds of kernels reach."""

    like: Literal["A100", "H100"]
    matmul: float
    flash_1: float
    """Attention, every product counted and not the causal half."""
    source: str
    """What it was fitted to, or whose it is assumed to be."""

    def attention(self, kernels: Kernels, shape: GPTShape, precision: Precision, gpu: GPU) -> float:
        """Fraction that attention reaches, every product counted and not the causal half.

        What FlashAttention does not take (a mask, fp32, an old GPU) PyTorch's memory-efficient kernel does, about as
        fast as FlashAttention 1 (Dao 2023, figure 4).
        """
        kernel = attention_kernel(
            shape.head_dim, is_16bit=precision != "fp32", masked=shape.has_mask, capability=gpu.capability
        )
        if kernels.attention == "flash-1" or not kernel.startswith("flash"):
            return self.flash_1
        head_dim = 64 if shape.head_dim < 96 else 128
        rates = _FLASH_2_TFLOPS[self.like][head_dim]
        return _interpolate(rates, shape.seq_len) * _FULL_PER_CAUSAL / _PEAK_TFLOPS[self.like]


def _interpolate(rates: dict[int, int], seq_len: int) -> float:
    """By the logarithm of the context; what lies outside is taken to be as at the end."""
    lengths = sorted(rates)
    for below, above in pairwise(lengths):
        if below <= seq_len <= above:
            share = math.log2(seq_len / below) / math.log2(above / below)
            return rates[below] + share * (rates[above] - rates[below])
    return rates[lengths[0] if seq_len < lengths[0] else lengths[-1]]


_A100 = KernelEfficiency("A100", 0.86, 0.55, "A100 rows of llm-foundry")
_H100 = KernelEfficiency("H100", 0.74, 0.315, "H100 rows of llm-foundry")
_CALIBRATED = {"a100-40gb": _A100, "a100-80gb": _A100, "h100-80gb": _H100}
#: GPUs as fast as an H100 or faster are as hard to keep busy; the A100's fractions would flatter them.
_LIKE_H100 = {"h100-80gb-pcie", "h200", "b200"}


def kernel_efficiency(gpu: GPU) -> KernelEfficiency:
    """The fit for this GPU, or the nearest GPU's, and it says so."""
    if gpu.name in _CALIBRATED:
        return _CALIBRATED[gpu.name]
    like = _H100 if gpu.name in _LIKE_H100 else _A100
    text = f"not calibrated, with the {like.like}'s efficiency"
    if gpu.memory_bytes_per_s is None:
        text += ", and memory as fast for its arithmetic as an A100's"
    return KernelEfficiency(like.like, like.matmul, like.flash_1, text)


def memory_bytes_per_s(gpu: GPU) -> float:
    """The GPU's memory bandwidth, or what an A100 80 GB has for its arithmetic rate where it is not known."""
    if gpu.memory_bytes_per_s:
        return gpu.memory_bytes_per_s
    a100 = get_gpu("a100-80gb")
    assert a100.memory_bytes_per_s is not None
    return a100.memory_bytes_per_s * gpu.dense_16bit_flops / a100.dense_16bit_flops
