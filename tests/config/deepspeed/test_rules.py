"""Combinations that DeepSpeed accepts and then ignores or crashes on."""

from __future__ import annotations

import pytest

from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.deepspeed.schema import ZeroOptimization, marks_of
from llmscale.errors import ConfigError

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/disk"}


def zero(stage: int, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (zero(2, offload_param=CPU), "offload_param needs stage 3; at stage 2 DeepSpeed ignores it"),
        (zero(0, offload_optimizer=CPU), "offload_optimizer needs stage 1, 2 or 3; at stage 0"),
        (zero(1, offload_optimizer=NVME), "uses the host memory instead"),
        (zero(2, offload_optimizer=NVME), "uses the host memory instead"),
        (zero(3, offload_optimizer={"device": "nvme"}), 'offload_optimizer.device "nvme" needs nvme_path'),
        (zero(3, offload_param={"device": "nvme"}), 'offload_param.device "nvme" needs nvme_path'),
        (zero(3, offload_optimizer={**NVME, "buffer_count": 3}), "AdamW needs 4"),
        (zero(3, offload_param=CPU, zero_hpz_partition_size=8), "Delete one of them"),
        (zero(3, offload_optimizer={**CPU, "ratio": 0.5}), "ratio 0.5 needs DeepSpeed's own CPU Adam"),
        ({**zero(1), **BF16, **FP16}, "bf16 and fp16 are both enabled"),
        ({**BF16, "torch_autocast": {"enabled": True}}, "bf16 and torch_autocast are both enabled"),
        (
            {**zero(1), "fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
            "above the first scale",
        ),
        ({**BF16, "data_types": {"grad_accum_dtype": "fp16"}}, "at stage 0. Legal: bf16, fp32."),
        ({**zero(2), **BF16, "data_types": {"grad_accum_dtype": "fp16"}}, "Legal: bf16, fp32."),
        ({**zero(2), "data_types": {"grad_accum_dtype": "bf16"}}, "precision fp32 at stage 2. Legal: fp32."),
        ({**zero(2), **BF16, "data_types": {"param_dtype": "fp32"}}, "contradicts the precision bf16"),
        ({**zero(0), **STATES}, "bf16_optimizer_states needs stage 1, 2 or 3"),
        ({**zero(2, offload_optimizer=CPU), **STATES}, "only with its own CPU Adam, and llmscale passes"),
        ({**zero(1), **STATES, "data_types": {"grad_accum_dtype": "fp32"}}, "its BF16_Optimizer keeps fp32 states"),
        ({**zero(2), "bf16": {"enabled": True, "bf16_optimizer_states": True}}, "need each other"),
        ({**zero(2), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "need each other"),
        ({**BF16, "communication_data_type": "fp16"}, "overflows with precision bf16"),
        ({"gradient_allreduce_op": "sum"}, "depend on the world size"),
        ({**zero(2), "prescale_gradients": True}, "stop DeepSpeed at stage 2 with reduce_scatter"),
        ({**zero(3), "gradient_predivide_factor": 2.0}, "stop DeepSpeed at stage 3 with reduce_scatter"),
        ({"gradient_predivide_factor": 0}, "must be above 0"),
        (zero(1, allgather_bucket_size=1001), "allgather_bucket_size 1001 must be even"),
    ],
)
def test_harmful_combinations_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_ds_config(config, "my.json")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        zero(1, offload_optimizer=CPU),
        zero(3, offload_optimizer=NVME, offload_param=NVME),
        zero(3, offload_param=CPU),
        zero(2, offload_param={"device": "none"}),
        {**zero(1), **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        {**zero(2, reduce_scatter=False), "prescale_gradients": True},
        {**zero(1), **FP16, "communication_data_type": "fp16"},
        {**BF16, "fp16": {"enabled": False}, "data_types": {"param_dtype": "bf16"}},
        {**zero(3, offload_param=CPU), **STATES, "data_types": {"grad_accum_dtype": "fp32"}},
        {**zero(1), **STATES},
    ],
)
def test_sound_combinations_pass_without_a_warning(config: dict[str, object]) -> None:
    assert parse_ds_config(config, "my.json").warnings == ()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            zero(2, stage3_max_live_parameters=1),
            "stage3_max_live_parameters has no effect at stage 2 (read only at stage 3)",
        ),
        (
            zero(3, round_robin_gradients=True),
            "round_robin_gradients has no effect at stage 3 (read only at stage 1, 2)",
        ),
        (zero(0, overlap_comm=True), "overlap_comm has no effect at stage 0"),
        (zero(2, allgather_partitions=True), "DeepSpeed 0.19.8 reads it nowhere"),
        (
            zero(3, offload_param={**CPU, "max_in_cpu": 5}),
            'offload_param.max_in_cpu has no effect with device "cpu"',
        ),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
            "lower_precision_safe_modules has no effect",
        ),
        ({**zero(3), "aio": {}}, "aio has no effect without NVMe offload"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last has no effect"),
        (
            {**zero(1), "fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 2}},
            "no effect with a static loss_scale",
        ),
        (
            {**zero(2), "bf16": {"enabled": True, "immediate_grad_update": True}},
            "immediate_grad_update has no effect",
        ),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, "number_checkpoints has no effect"),
        (
            {**zero(2), "bf16": {"enabled": False, "bf16_optimizer_states": True}},
            "bf16_optimizer_states has no effect without bf16 precision",
        ),
    ],
)
def test_ignored_keys_are_warned_about(config: dict[str, object], words: str) -> None:
    (warning,) = parse_ds_config(config, "my.json").warnings
    assert words in warning


def test_every_key_of_the_zero_section_has_its_stages() -> None:
    own_rules = {"stage", "offload_optimizer", "offload_param"}
    marked = {name for name in ZeroOptimization.model_fields if marks_of(ZeroOptimization, name)}
    assert set(ZeroOptimization.model_fields) - own_rules == marked


def problems_of(config: dict[str, object]) -> list[str]:
    return [problem.text for problem in find_problems(read_foreign(config))]


def test_a_section_that_is_none_hides_no_other_problem() -> None:
    problems = problems_of({"zero_optimization": 3, "fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert problems[0].startswith("zero_optimization = 3: must be an object {...}.")
    assert "bf16 and fp16 are both enabled" in "\n".join(problems)


def test_what_is_given_is_left_as_it_is() -> None:
    config: dict[str, object] = {"zero_optimization": {"stage": 1, "nothing": 1}}
    problems_of(config)
    assert config == {"zero_optimization": {"stage": 1, "nothing": 1}}
