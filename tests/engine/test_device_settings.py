from __future__ import annotations

import pytest
import torch

from llmscale.engine.device_memory import peak_memory_bytes
from llmscale.engine.device_settings import allow_tf32, set_allocator_default


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_segments_grow_unless_the_user_has_set_the_allocator(given: dict[str, str], expected: dict[str, str]) -> None:
    set_allocator_default(given)
    assert given == expected


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "highest"), ("bf16", "high"), ("autocast", "high")])
def test_fp32_products_are_rounded_only_where_fp32_was_not_asked_for(precision, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        allow_tf32(precision)
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_users_tf32_stays(precision, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    try:
        allow_tf32(precision)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this is device memory")
def test_peak_memory_is_in_bytes() -> None:
    assert 50 * 2**20 < peak_memory_bytes() < 2**40, "a Python process with torch"
