"""How many bytes of logits the loss in chunks holds, beside the loss that everybody writes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.config.loss_settings import LossSettings
from llmscale.config.presets import get_preset
from llmscale.dry_run.simulated_gpu import cuda_kernels
from llmscale.dry_run.tracker import Category, MemoryTracker
from llmscale.model.loss import chunked_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def in_chunks(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    return chunked_cross_entropy(x, weight, targets, vocab_size, LossSettings()).mean


def whole(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """nanoGPT's: logits in 16 bit, made fp32."""
    return F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets)


def logits_peak_bytes(loss_of: Loss, model: str, tokens: int, dtype: torch.dtype) -> int:
    """Most that is alive of tensors with a number for every token and every row of the head: logits, what they are
    copied to, their softmax, their gradients. In a forward and a backward pass on a GPU; nothing is computed."""
    shape = get_preset(model).shape(128_256 if model == "llama3-8b" else 50_257)
    rows = shape.padded_vocab_size

    def classify(tensor: Tensor, *_: object) -> Category | None:
        is_logits = tensor.ndim == 2 and tensor.shape[0] <= tokens and tensor.shape[1] in (shape.vocab_size, rows)
        return Category.LOGITS if is_logits else None

    with FakeTensorMode(), cuda_kernels(), MemoryTracker(classify=classify) as tracker:
        x = torch.empty(tokens, shape.n_embd, dtype=dtype, requires_grad=True)
        weight = torch.empty(rows, shape.n_embd, dtype=dtype, requires_grad=True)
        loss_of(x, weight, torch.zeros(tokens, dtype=torch.long), shape.vocab_size).backward()
    others = [category for category in Category if category is not Category.LOGITS]
    return tracker.peaks(*others)[""].logits_bytes


@pytest.mark.parametrize(
    ("model", "dtype", "least_tokens"),
    [
        ("gpt2-124m", torch.bfloat16, 4096),
        ("gpt2-1.5b", torch.float16, 4096),
        ("llama3-8b", torch.float32, 8192),
    ],
)
def test_nine_tenths_of_the_logits_bytes_never_exist(model: str, dtype: torch.dtype, least_tokens: int) -> None:
    for tokens in (least_tokens, 4 * least_tokens):
        chunked, everything = (logits_peak_bytes(loss, model, tokens, dtype) for loss in (in_chunks, whole))
        logits = tokens * get_preset(model).shape(128_256 if model == "llama3-8b" else 50_257).vocab_size
        assert everything == pytest.approx(12 * logits, rel=0.01)
        assert chunked <= 0.1 * everything, (tokens, chunked, everything)
