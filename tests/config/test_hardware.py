from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.config.hardware import (
    GPU_TABLE_HEAD,
    GPUS,
    custom_gpu,
    find_gpu,
    get_gpu,
    get_interconnect,
    gpu_table_rows,
    has_bf16_instructions,
    model_flops_utilisation,
)
from llmscale.errors import ConfigError


@pytest.mark.parametrize(
    ("device_name", "name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 312),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie", 312),
        ("NVIDIA H100 80GB HBM3", "h100-80gb", 989),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie", 756),
        ("NVIDIA L40S", "l40s", 362),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 165.2),
        ("AMD Instinct MI300X", "mi300x", 1307.4),
    ],
)
def test_names_as_drivers_report_them(device_name: str, name: str, teraflops: float) -> None:
    gpu = find_gpu(device_name)
    assert gpu is not None
    assert (gpu.name, gpu.dense_16bit_flops) == (name, teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    ],
)
def test_unknown_hardware_gives_none_and_not_a_neighbour(name: str) -> None:
    assert find_gpu(name) is None
    assert model_flops_utilisation(1e5, 10**9, name, is_16bit=True) is None


def test_utilisation_is_achieved_over_peak() -> None:
    # 100,000 tokens/s at 1.56 GFLOP per token are 156 TFLOP/s: half of an A100.
    assert model_flops_utilisation(1e5, 1_560_000_000, "NVIDIA A100-SXM4-80GB", is_16bit=True) == pytest.approx(0.5)
    assert model_flops_utilisation(1e5, 10**9, "NVIDIA A100-SXM4-80GB", is_16bit=False) is None


def test_a_gpu_is_found_by_its_name_in_any_case() -> None:
    assert get_gpu("H100-80GB").link_bytes_per_s == 450e9  # NVLink 4: 900 GB/s counting both directions


def test_a_misspelt_gpu_names_the_closest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"GPU 'h100-80' is not in the table\. Did you mean 'h100-80gb'\?") as error:
        get_gpu("h100-80")
    assert all(gpu.name in str(error.value) for gpu in GPUS)
    assert "--gpu-memory-gib" in str(error.value)


def test_cards_older_than_ampere_have_no_bf16() -> None:
    assert [gpu.name for gpu in GPUS if not gpu.has_bf16] == ["t4", "v100-16gb", "v100-32gb"]
    assert [gpu.name for gpu in GPUS if gpu.capability < (8, 0)] == ["t4", "v100-16gb", "v100-32gb"]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_numbers_are_in_the_units_that_they_claim(gpu) -> None:
    assert 10 < gpu.memory_gib < 300
    assert 50e12 < gpu.dense_16bit_flops < 3e15
    assert gpu.fp32_flops is None or gpu.fp32_flops < gpu.dense_16bit_flops
    assert gpu.memory_bytes_per_s is not None and 2e11 < gpu.memory_bytes_per_s < 1e13
    assert 1e10 < gpu.link_bytes_per_s < gpu.memory_bytes_per_s
    assert gpu.source


def test_table_rows_say_what_is_not_known() -> None:
    rows = {row[0]: row for row in gpu_table_rows()}
    assert all(len(row) == len(GPU_TABLE_HEAD) for row in rows.values())
    assert rows["a10g"][GPU_TABLE_HEAD.index("W")] == "-"
    assert rows["h100-80gb"][GPU_TABLE_HEAD.index("link GB/s")] == "450"


def test_a_custom_card_keeps_what_nobody_said_unknown() -> None:
    gpu = custom_gpu(48, 150)
    assert (gpu.memory_gib, gpu.dense_16bit_flops, gpu.has_bf16) == (48, 150e12, True)
    assert gpu.memory_bytes_per_s is None and gpu.power_w is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512_vnni avx512_bf16 clzero", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
    ],
)
def test_a_cpu_s_flags_tell_of_bf16(line: str, expected: bool, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\n{line}\n")
    assert has_bf16_instructions(info) is expected
    assert not has_bf16_instructions(tmp_path / "none")


def test_a_rail_per_gpu_adds_up() -> None:
    # A DGX H100 has 8 adapters of 400 Gbit/s.
    assert get_interconnect("ib-400g").bytes_per_s_per_node(8) == 8 * 50e9


def test_one_adapter_per_node_does_not_grow_with_its_gpus() -> None:
    assert get_interconnect("ethernet-25g").bytes_per_s_per_node(8) == pytest.approx(25e9 / 8)


@pytest.mark.parametrize("name", ["80", "80g", "80gib", "80 GB"])
def test_a_size_without_its_unit_has_a_hint(name: str) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean '80gb', any GPU of that size\?"):
        get_gpu(name)
