from __future__ import annotations

import pytest

from llmscale.config.hardware import find_gpu, model_flops_utilisation


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
    ],
)
def test_names_as_drivers_report_them(name: str, teraflops: float) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.dense_16bit_flops == teraflops * 1e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA A10G", "", "NVIDIA T400"])
def test_unknown_hardware_gives_none_and_not_a_neighbour(name: str) -> None:
    assert find_gpu(name) is None
    assert model_flops_utilisation(1e5, 10**9, name, is_16bit=True) is None


def test_utilisation_is_achieved_over_peak() -> None:
    # 100,000 tokens/s at 1.56 GFLOP per token are 156 TFLOP/s: half of an A100.
    assert model_flops_utilisation(1e5, 1_560_000_000, "NVIDIA A100-SXM4-80GB", is_16bit=True) == pytest.approx(0.5)


def test_fp32_has_no_peak_in_the_table() -> None:
    assert model_flops_utilisation(1e5, 10**9, "NVIDIA A100-SXM4-80GB", is_16bit=False) is None
