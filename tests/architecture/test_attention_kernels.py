"""Which kernel a GPU runs attention with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.attention_kernels import (
    ComputeCapability,
    attention_kernel,
    has_flash_attention,
    training_kernel,
)
from llmscale.architecture.shape import GPTShape

T4, V100, A100, A10, RTX5090 = (7, 5), (7, 0), (8, 0), (8, 6), (12, 0)


@pytest.mark.parametrize("capability", [None, A100, RTX5090])
def test_flash_attention_needs_16_bit_heads_of_up_to_256_and_no_mask(capability: ComputeCapability | None) -> None:
    def kernel(head_dim: int, *, is_16bit: bool = True, masked: bool = False) -> str:
        return attention_kernel(head_dim, is_16bit=is_16bit, masked=masked, capability=capability)

    assert (kernel(64), kernel(256), kernel(36)) == ("flash", "flash", "flash_padded")
    assert (kernel(264), kernel(64, masked=True), kernel(64, is_16bit=False)) == ("efficient",) * 3
    assert (kernel(258), kernel(36, masked=True), kernel(34, is_16bit=False)) == ("math",) * 3


@pytest.mark.parametrize("capability", [T4, V100])
def test_gpus_before_ampere_have_no_flash_attention(capability: ComputeCapability) -> None:
    assert not has_flash_attention(64, is_16bit=True, drops_out=False, capability=capability)
    assert attention_kernel(64, is_16bit=True, capability=capability) == "efficient"
    assert attention_kernel(36, is_16bit=True, capability=capability) == "math"
    # Without tensor cores for fp32 nothing needs to be aligned.
    assert attention_kernel(33, is_16bit=False, capability=capability) == "efficient"


def test_cards_with_little_shared_memory_do_not_train_wide_heads_with_flash_attention() -> None:
    def kernels(capability: ComputeCapability) -> list[str]:
        return [
            attention_kernel(head_dim, is_16bit=True, drops_out=drops_out, capability=capability)
            for head_dim in (192, 208, 256)
            for drops_out in (False, True)
        ]

    assert kernels(A100) == ["flash"] * 6
    for small in (A10, RTX5090):
        assert kernels(small) == ["flash", "flash", "efficient", "efficient", "flash", "efficient"]


def test_a_mask_takes_flex_attention_where_it_is_faster_and_safe() -> None:
    masked = GPTShape(2, 4, 256, 100, 512, sliding_window=64)

    def kernel(shape: GPTShape = masked, checkpointing: str = "full", capability: ComputeCapability = A100) -> str:
        return training_kernel(shape, is_16bit=True, checkpointing=checkpointing, capability=capability)

    assert kernel() == kernel(capability=RTX5090) == "flex"
    assert kernel(replace(masked, sliding_window=0)) == "flash"
    others = {"dropout": 0.1, "attention_kernel": "sdpa", "head_dim": 48}
    assert {kernel(replace(masked, **{key: value})) for key, value in others.items()} == {"efficient"}
    assert kernel(checkpointing="selective") == kernel(capability=T4) == "efficient"
    assert training_kernel(masked, is_16bit=False, checkpointing="none", capability=A100) == "efficient"
