from __future__ import annotations

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import get_gpu
from llmscale.planning.kernels import KernelSettings, kernel_efficiency


@pytest.mark.parametrize(
    ("gpu", "n_head", "seq_len", "tflops"),
    [
        ("a100-80gb", 16, 2048, 155),
        ("a100-80gb", 32, 16_384, 171),
        ("h100-80gb", 16, 8192, 308),
        ("h100-80gb", 16, 65_536, 328),
        ("h100-80gb", 16, 128, 163),
    ],
)
def test_flash_attention_2_is_as_fast_as_its_paper_says(gpu: str, n_head: int, seq_len: int, tflops: float) -> None:
    """It counts half of the products, 3.5 times; we count all, 3 times."""
    shape, device = GPTShape(2, n_head, 2048, 50304, seq_len), get_gpu(gpu)
    share = kernel_efficiency(device).attention(KernelSettings(), shape, "bf16", device)
    assert share * device.dense_16bit_flops / 1e12 == pytest.approx(tflops * 2 * 3 / 3.5)


def test_between_two_contexts_it_lies_between() -> None:
    gpu = get_gpu("h100-80gb")
    shares = [
        kernel_efficiency(gpu).attention(KernelSettings(), GPTShape(2, 16, 2048, 50304, seq_len), "bf16", gpu)
        for seq_len in (2048, 3000, 4096)
    ]
    assert shares == sorted(shares) and shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize(("gpu", "precision"), [("t4", "fp16"), ("h100-80gb", "fp32")])
def test_what_flash_attention_does_not_take_is_as_fast_as_the_first_one(gpu: str, precision) -> None:
    device = get_gpu(gpu)
    efficiency = kernel_efficiency(device)
    shape = GPTShape(2, 16, 2048, 50304, 8192)
    assert efficiency.attention(KernelSettings(), shape, precision, device) == efficiency.flash_1


def test_the_loss_in_chunks_moves_less_where_the_model_is_narrow_or_the_batch_small() -> None:
    at_once, chunked = KernelSettings(loss_chunk_tokens=None), KernelSettings()
    assert chunked.logit_bytes(768, 2048) == 18
    assert chunked.logit_bytes(768, 16_384) == pytest.approx(18 + 12 * 768 / 2048)
    assert chunked.logit_bytes(768, 16_384) < at_once.logit_bytes(768, 16_384) < chunked.logit_bytes(8192, 16_384)
    assert KernelSettings(loss_chunk_tokens=8192).logit_bytes(8192, 16_384) < chunked.logit_bytes(8192, 16_384)
