"""Setups of the estimate of DeepSpeed's own memory."""

from __future__ import annotations

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.config.resolve import resolve_step
from llmscale.memory.states.state_memory import ZeroSetup, tensor_bytes, zero_setup

SHAPE = GPTShape(n_layer=2, n_head=4, n_embd=64, vocab_size=1000, seq_len=16)


def setup_of(**config: object) -> ZeroSetup:
    plan = BatchPlan(64, 2, 4, ParallelLayout(8), seq_len=16)
    return zero_setup(resolve_step(parse_ds_config(config, "test"), SHAPE, plan, "none"))


def test_defaults_of_a_resolved_config() -> None:
    setup = setup_of(zero_optimization={"stage": 2}, bf16={"enabled": True})
    assert (setup.stage, setup.shard_ranks, setup.config.gradient_accumulation_steps) == (2, 8, 4)
    assert (setup.config.precision, setup.config.model_dtype, setup.config.grad_accum_dtype) == ("bf16", "bf16", "fp32")
    assert setup.zero.reduce_bucket_size == SHAPE.num_parameters
    assert setup.zero.offload_optimizer.device == setup.zero.offload_param.device == "none"
    assert not setup.zero.overlap_comm


def test_stage_3_overlaps_and_fills_auto_sizes() -> None:
    setup = setup_of(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": "auto"})
    assert setup.zero.overlap_comm
    assert setup.zero.stage3_prefetch_bucket_size == int(0.9 * 64 * 64)


def test_autocast_stores_fp32() -> None:
    setup = setup_of(zero_optimization={"stage": 1}, torch_autocast={"enabled": True})
    assert (setup.config.precision, setup.config.model_dtype) == ("autocast", "fp32")


def test_offload_sections() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    setup = setup_of(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": nvme},
        activation_checkpointing={"cpu_checkpointing": True},
    )
    assert (setup.zero.offload_optimizer.device, setup.zero.offload_optimizer.pin_memory) == ("cpu", True)
    assert (setup.zero.offload_param.device, setup.zero.offload_param.buffer_count) == ("nvme", 5)
    assert setup.config.cpu_checkpointing


def test_tensors_are_rounded_to_whole_blocks() -> None:
    assert (tensor_bytes(257, "bf16"), tensor_bytes(128, "fp32")) == (1024, 512)
