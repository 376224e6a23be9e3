"""What goes to deepspeed.initialize: nothing left open, nothing left to DeepSpeed's defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config, resolve_ds_config, without_pinned_memory
from llmscale.config.deepspeed.schema import Precision
from llmscale.errors import ConfigError

AUTO_EVERYWHERE: dict[str, object] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "torch_autocast": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


@dataclass(frozen=True)
class Size:
    """What of a model decides DeepSpeed's buffers."""

    n_embd: int
    num_parameters: int


def resolve(
    config: dict[str, object],
    *,
    has_gpu: bool = True,
    precision_override: Precision | None = None,
    gradient_clipping: float | None = None,
    num_parameters: int = 10_000_001,
    gradient_accumulation_steps: int = 2,
) -> dict[str, object]:
    ds = parse_ds_config(config, "my.json").with_flags(precision_override, gradient_clipping)
    plan = BatchPlan(32 * gradient_accumulation_steps, 4, gradient_accumulation_steps, ParallelLayout(8), seq_len=16)
    resolved = resolve_ds_config(ds, Size(100, num_parameters), plan)
    return resolved if has_gpu else without_pinned_memory(resolved)


def section(config: dict[str, object], name: str) -> dict[str, object]:
    value = config[name]
    assert isinstance(value, dict)
    return value


def leaves(value: object) -> Iterator[object]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if children is None:
        yield value
    else:
        for child in children:
            yield from leaves(child)


def zero(stage: int, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_no_auto_reaches_deepspeed(precision: Precision | None) -> None:
    resolved = resolve(AUTO_EVERYWHERE, precision_override=precision)
    assert "auto" not in list(leaves(resolved))
    assert json.loads(json.dumps(resolved)) == resolved


def test_auto_sizes_follow_the_width_as_in_hugging_faces_trainer() -> None:
    sizes = section(resolve(AUTO_EVERYWHERE), "zero_optimization")
    assert sizes["reduce_bucket_size"] == 10_000
    assert sizes["stage3_prefetch_bucket_size"] == 9_000
    assert sizes["stage3_param_persistence_threshold"] == 1_000


@pytest.mark.parametrize("written", [None, "auto", 10, 24])
def test_deepspeed_counts_fillers_and_parts_of_sequences(written: object) -> None:
    """10 sequences on 4 groups of 2 ranks. The file may have the batch, or DeepSpeed's number."""
    ds = parse_ds_config({} if written is None else {"train_batch_size": written}, "my.json")
    plan = BatchPlan(10, 1, 3, ParallelLayout(8, 2), seq_len=16)
    assert resolve_ds_config(ds, Size(100, 1000), plan)["train_batch_size"] == 24
    assert ds.batch_notices(plan) == []


def test_hpz_groups_must_divide_the_ranks() -> None:
    def ranks(group: int) -> dict[str, object]:
        return {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": group}}

    plan = BatchPlan(6, 1, 1, ParallelLayout(6), seq_len=16)
    assert resolve_ds_config(parse_ds_config(ranks(3), "my.json"), Size(100, 1000), plan)
    with pytest.raises(ConfigError, match="zero_hpz_partition_size 4 does not divide the 6 ranks"):
        resolve_ds_config(parse_ds_config(ranks(4), "my.json"), Size(100, 1000), plan)


@pytest.mark.parametrize(
    ("written", "flag", "clipping"),
    [
        ("auto", None, 1.0),
        (0, None, 0),
        (0.5, None, 0.5),
        (0.5, 0.0, 0.0),
    ],
)
def test_gradient_clipping_flag_over_file_over_default(written: object, flag: float | None, clipping: float) -> None:
    assert resolve({"gradient_clipping": written}, gradient_clipping=flag)["gradient_clipping"] == clipping


def test_a_bucket_is_never_larger_than_the_model_and_even() -> None:
    assert section(resolve(zero(2)), "zero_optimization")["reduce_bucket_size"] == 10_000_002
    large = section(resolve(zero(2), num_parameters=10**10), "zero_optimization")
    assert large["reduce_bucket_size"] == large["allgather_bucket_size"] == 500_000_000
    own = section(resolve(zero(2, reduce_bucket_size=5e7)), "zero_optimization")
    assert own["reduce_bucket_size"] == 50_000_000


def test_stage_0_has_nothing_to_configure() -> None:
    assert section(resolve(zero(0)), "zero_optimization") == {"stage": 0}


@pytest.mark.parametrize(
    ("has_gpu", "written", "pinned"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"pin_memory": False}, False),
        (False, {"pin_memory": True}, False),
    ],
)
def test_host_memory_is_pinned_for_a_gpu_only(has_gpu: bool, written: dict[str, object], pinned: bool) -> None:
    config = zero(3, offload_optimizer={"device": "cpu", **written}, offload_param={"device": "none"})
    resolved = section(resolve(config, has_gpu=has_gpu), "zero_optimization")
    assert resolved["offload_optimizer"] == {"device": "cpu", "pin_memory": pinned}
    assert "offload_param" not in resolved


@pytest.mark.parametrize(
    ("stage", "precision", "communication"),
    [
        (0, "bf16", "bf16"),
        (3, "bf16", "bf16"),
        (1, "fp16", "fp16"),
        (0, "fp32", "fp32"),
        (2, "autocast", "bf16"),
    ],
)
def test_types_of_gradients_are_written_out(stage: int, precision: Precision, communication: str) -> None:
    resolved = resolve(zero(stage), precision_override=precision)
    assert section(resolved, "data_types") == {"grad_accum_dtype": "fp32"}
    assert resolved["communication_data_type"] == communication
    switched_on = {name for name in ("bf16", "fp16", "torch_autocast") if section(resolved, name)["enabled"] is True}
    assert switched_on == {"torch_autocast" if precision == "autocast" else precision} - {"fp32"}


@pytest.mark.parametrize(
    ("config", "precision", "accumulation"),
    [
        (zero(0), "bf16", "bf16"),
        (zero(1), "fp16", "fp16"),
        (zero(2), "bf16", "fp32"),
        (zero(3), "fp16", "fp32"),
        # The host has the optimizer, and the GPU keeps no sums.
        (zero(2, offload_optimizer={"device": "cpu"}), "bf16", "bf16"),
    ],
)
def test_one_micro_step_is_no_sum(config: dict[str, object], precision: Precision, accumulation: str) -> None:
    for micro_steps, expected in ((1, accumulation), (2, "fp32")):
        resolved = resolve(config, precision_override=precision, gradient_accumulation_steps=micro_steps)
        assert section(resolved, "data_types") == {"grad_accum_dtype": expected}


def test_the_file_wins_over_defaults_and_the_override_over_the_file() -> None:
    config = {
        **zero(2, overlap_comm=True),
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    resolved = resolve(config)
    assert section(resolved, "zero_optimization")["overlap_comm"] is True
    assert section(resolved, "data_types") == {"grad_accum_dtype": "bf16"}
    assert section(resolve({**zero(1), "bf16": {"enabled": True}}, precision_override="fp32"), "bf16") == {
        "enabled": False
    }


def test_an_override_that_the_file_forbids_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with precision fp32: data_types\.grad_accum_dtype bf16"):
        resolve(
            {**zero(2), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            precision_override="fp32",
        )


def test_defaults_that_moved_are_written_out() -> None:
    resolved = resolve({**zero(1), "bf16": {"enabled": True}})
    assert section(resolved, "bf16")["check_grad_overflow"] is True
    assert resolved["zero_allow_untested_optimizer"] is True
    assert resolved["zero_force_ds_cpu_optimizer"] is False
    assert resolved["wall_clock_breakdown"] is False
    assert resolved["timers"] == {"throughput": {"enabled": False, "synchronized": False}}
    loss_scale = section(resolve({**zero(1), "fp16": {"enabled": True}}), "fp16")
    assert (loss_scale["loss_scale"], loss_scale["initial_scale_power"], loss_scale["hysteresis"]) == (
        0,
        16,
        2,
    )


def test_what_the_file_says_besides_is_kept() -> None:
    config = {"activation_checkpointing": {"cpu_checkpointing": True}, "steps_per_print": 5}
    resolved = resolve(config)
    assert resolved["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert resolved["steps_per_print"] == 5
