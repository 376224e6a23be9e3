from __future__ import annotations

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import custom_gpu, get_gpu
from llmscale.planning.compute_time import estimate_compute_s, peak_flops
from llmscale.planning.kernels import Kernels

SHAPE = GPTShape(32, 32, 4096, 50304, 2048)


def seconds(checkpointing: CheckpointingMode = "none", gpu: str = "a100-80gb", micro: int = 4) -> float:
    found = estimate_compute_s(SHAPE, micro, "bf16", checkpointing, get_gpu(gpu))
    assert found is not None
    return found


def test_never_faster_than_the_peak_rate() -> None:
    ideal = SHAPE.flops_per_token * 4 * SHAPE.seq_len / 312e12
    assert ideal < seconds() < 2.5 * ideal


def test_time_grows_with_the_micro_batch() -> None:
    assert seconds(micro=8) == pytest.approx(2 * seconds(micro=4))


def test_full_recomputation_costs_a_forward_pass_and_selective_much_less() -> None:
    none, selective, full = seconds("none"), seconds("selective"), seconds("full")
    # The output head is not recomputed, so it stays just below 4/3.
    assert 1.28 < full / none < 4 / 3
    assert 1.0 < selective / none < 1.1


def test_a_narrow_model_spends_more_on_memory_traffic() -> None:
    narrow = GPTShape(12, 12, 768, 50304, 2048)
    time = estimate_compute_s(narrow, 8, "bf16", "none", get_gpu("a100-80gb"))
    assert time is not None
    narrow_rate = narrow.flops_per_token * 8 * 2048 / time
    wide_rate = SHAPE.flops_per_token * 8 * 2048 / seconds(micro=8)
    assert narrow_rate < 0.85 * wide_rate


def test_fp32_runs_at_the_fp32_rate() -> None:
    slow = estimate_compute_s(SHAPE, 4, "fp32", "none", get_gpu("a100-80gb"))
    assert slow is not None and slow > 8 * seconds()


def test_no_rate_no_time() -> None:
    assert peak_flops(get_gpu("a10g"), "fp32") is None
    assert estimate_compute_s(SHAPE, 4, "fp32", "none", get_gpu("a10g")) is None


def test_a_gpu_of_unknown_bandwidth_is_as_balanced_as_an_a100() -> None:
    assert estimate_compute_s(SHAPE, 4, "bf16", "none", custom_gpu(80, 312)) == pytest.approx(seconds())


def test_compiled_blocks_and_a_newer_attention_take_less_time() -> None:
    def long(kernels: Kernels) -> float:
        shape = GPTShape(32, 32, 4096, 50304, 16_384)
        found = estimate_compute_s(shape, 1, "bf16", "none", get_gpu("a100-80gb"), kernels)
        assert found is not None
        return found

    assert long(Kernels()) < 0.9 * long(Kernels("flash-1"))
    assert long(Kernels(compiled_blocks=True)) < 0.97 * long(Kernels())


def test_a_mask_costs_the_newer_attention() -> None:
    plain = GPTShape(32, 32, 4096, 50304, 16_384)
    windowed = GPTShape(32, 32, 4096, 50304, 16_384, sliding_window=4096)
    without, masked = (estimate_compute_s(s, 1, "bf16", "none", get_gpu("h100-80gb")) for s in (plain, windowed))
    assert without is not None and masked is not None and masked > 1.3 * without
