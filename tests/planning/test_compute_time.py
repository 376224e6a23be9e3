from __future__ import annotations

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.hardware import custom_gpu, get_gpu
from llmscale.planning.compute_time import estimate_compute_s, kernel_efficiency, peak_flops

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


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        ("a100-40gb", "A100 rows of llm-foundry"),
        ("h100-80gb", "H100 rows of llm-foundry"),
        ("h200", "not calibrated: assumes H100's efficiency"),
        ("l4", "not calibrated: assumes A100's efficiency"),
    ],
)
def test_every_card_says_what_its_efficiency_rests_on(gpu: str, text: str) -> None:
    assert kernel_efficiency(get_gpu(gpu)).source == text


def test_a_card_of_unknown_bandwidth_says_what_is_assumed() -> None:
    gpu = custom_gpu(80, 312)
    assert "memory as fast for its arithmetic as A100's" in kernel_efficiency(gpu).source
    assert estimate_compute_s(SHAPE, 4, "bf16", "none", gpu) == pytest.approx(seconds())
