"""What of a ds_config decides memory."""

from __future__ import annotations

import pytest

from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import resolve_ds_config
from llmscale.config.deepspeed.schema import parse_ds_config
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.errors import ConfigError
from llmscale.memory.zero_settings import EngineLayout, build_layout, tensor_bytes
from tests.config.deepspeed.test_resolve import Size


def layout_of(**config: object) -> EngineLayout:
    plan = BatchPlan(64, 2, 4, ParallelLayout(8), seq_len=16)
    resolved = resolve_ds_config(parse_ds_config(config, "test"), Size(64, 1_000_001), plan)
    return build_layout(resolved, plan.ranks)


def test_defaults_of_a_resolved_config() -> None:
    layout = layout_of(zero_optimization={"stage": 2}, bf16={"enabled": True})
    assert (layout.zero_stage, layout.ranks.shard_ranks, layout.gradient_accumulation_steps) == (2, 8, 4)
    assert (layout.precision, layout.model_dtype, layout.grad_accum_dtype) == ("bf16", "bf16", "fp32")
    assert layout.parameter_width == 2
    assert layout.reduce_bucket_size == 1_000_002
    assert layout.offload_optimizer.device == "none"
    assert not layout.overlap_comm


def test_stage_3_overlaps_and_fills_auto_sizes() -> None:
    layout = layout_of(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": "auto"})
    assert layout.overlap_comm
    assert layout.stage3_prefetch_bucket_size == int(0.9 * 64 * 64)


def test_autocast_stores_fp32() -> None:
    layout = layout_of(zero_optimization={"stage": 1}, torch_autocast={"enabled": True})
    assert (layout.precision, layout.model_dtype, layout.parameter_width) == ("autocast", "fp32", 4)


def test_offload_sections() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    layout = layout_of(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": nvme},
        activation_checkpointing={"cpu_checkpointing": True},
    )
    assert (layout.offload_optimizer.device, layout.offload_optimizer.pin_memory) == ("cpu", True)
    assert (layout.offload_param.device, layout.offload_param.buffer_count) == ("nvme", 5)
    assert layout.cpu_checkpointing


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1, "communication_data_type": "fp32"},
    ],
)
def test_an_open_config_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="resolved"):
        build_layout(config, ParallelLayout(2))


def test_tensors_are_rounded_to_whole_blocks() -> None:
    assert (tensor_bytes(257, "bf16"), tensor_bytes(128, "fp32")) == (1024, 512)
