"""The closed schema: what is refused, with which words, and what a checked config answers."""

from __future__ import annotations

import pytest

from llmscale.config.deepspeed.foreign import ENTRIES, NEUTRAL_VALUES, apply_edits
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.errors import ConfigError


def parse(**config: object) -> DsConfig:
    return parse_ds_config(config, "my.json")


def refusal(**config: object) -> str:
    with pytest.raises(ConfigError) as error:
        parse(**config)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("my.json: ")
    return text


def nested(dotted: str, value: object) -> dict[str, object]:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


# reading the file


# unknown keys


def test_a_key_at_the_wrong_level_is_sent_home() -> None:
    assert "It belongs in zero_optimization." in refusal(offload_optimizer={"device": "cpu"})
    assert "It belongs in the top level." in refusal(zero_optimization={"stage": 1, "gradient_clipping": 1.0})


def test_an_unknown_key_close_to_none_lists_the_legal_ones() -> None:
    text = refusal(aio={"xyzzy": 1})
    assert "Legal keys of aio: block_size, intra_op_parallelism, overlap_events" in text


# types and values


@pytest.mark.parametrize(
    ("dotted", "value", "words"),
    [
        ("zero_optimization.stage", 4, "= 4: must be 0, 1, 2 or 3"),
        ("zero_optimization.stage", "2", '= "2": must be 0, 1, 2 or 3'),
        ("zero_optimization", 2, "= 2: must be an object {...}"),
        ("zero_optimization", {}, "zero_optimization.stage is missing"),
        ("bf16", {}, "bf16.enabled is missing"),
        ("bf16.enabled", 1, "= 1: must be true or false"),
        ("gradient_clipping", -1, "= -1: must be a number of at least 0"),
        ("train_batch_size", 1.5, "= 1.5: must be a whole number of at least 1"),
        ("communication_data_type", "fp8", "= \"fp8\": must be 'fp32', 'bf16' or 'fp16'"),
        ("comms_logger.prof_ops", "all_reduce", "must be a list of strings"),
        ("torch_autocast", {"enabled": True, "dtype": "float16"}, "must be 'bfloat16' or 'bf16'"),
        ("tensorboard.output_path", 3, "tensorboard.output_path"),
    ],
)
def test_wrong_values_name_the_legal_ones(dotted: str, value: object, words: str) -> None:
    text = refusal(**nested(dotted, value))
    assert dotted in text
    assert words in text


@pytest.mark.parametrize("dotted", ["communication_data_type", "steps_per_print", "zero_optimization.overlap_comm"])
def test_auto_is_the_default_where_nothing_else_follows_from_the_run(dotted: str) -> None:
    filled = {"zero_optimization": {"stage": 2}, **nested(dotted, "auto")}
    if "." in dotted:
        filled = {"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}
    assert parse(**filled).keys == parse(zero_optimization={"stage": 2}).keys


def test_auto_is_taken_where_it_is_filled() -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    config = parse(
        zero_optimization=zero,
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        fp16={"enabled": "auto"},
    )
    assert config.precision == "bf16"
    assert config.gradient_clipping is None


#: A value that switches each entry on.
ON = {"sparse_attention": {"mode": "fixed"}, "zero_optimization.mics_shard_size": 8}


@pytest.mark.parametrize("dotted", [path for path, entry in ENTRIES.items() if entry.is_refused])
def test_unsupported_entries_are_refused_by_name_unless_they_are_off(dotted: str) -> None:
    config = nested(dotted, ON.get(dotted, {"enabled": True}))
    if dotted.startswith("data_efficiency."):
        assert parse(**config).warnings == ()
        apply_edits(config, {"data_efficiency.enabled": True})
    text = refusal(**config)
    assert f"'{dotted}' is not supported: " in text
    section = dotted.rpartition(".")[0]
    required: dict[str, object] = {"zero_optimization": {"stage": 0}} if section == "zero_optimization" else {}
    if section in ("fp16", "bf16"):
        required = {section: {"enabled": False}}
    neutral = NEUTRAL_VALUES.get(dotted, (False,))
    apply_edits(required, {dotted: neutral[-1]})
    assert parse(**required).warnings == ()


@pytest.mark.parametrize("dotted", [path for path, entry in ENTRIES.items() if not entry.is_refused])
def test_entries_without_effect_are_named(dotted: str) -> None:
    value = {"zero_allow_untested_optimizer": False, "zero_optimization.compute_grad_norm": False}.get(dotted)
    config = nested(dotted, {"enabled": True} if value is None else value)
    if "zero_optimization" in config:
        config["zero_optimization"]["stage"] = 2  # type: ignore[index]
    if "torch_autocast" in config:
        config["torch_autocast"]["enabled"] = True  # type: ignore[index]
    (warning,) = parse(**config).warnings
    assert warning.startswith(f"{dotted} has no effect: ")


# what it answers


def test_an_empty_object_is_plain_fp32_data_parallel() -> None:
    config = parse()
    assert (config.zero_stage, config.precision, config.checkpointing) == (0, "fp32", "none")
    assert (config.keys.offload_optimizer_device, config.keys.offload_param_device) == ("none", "none")


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": "auto"}, "torch_autocast": {"enabled": True}}, "autocast"),
        ({"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}, "fp16"),
    ],
)
def test_precision(config: dict[str, object], precision: str) -> None:
    assert parse(**config).precision == precision


def test_the_section_switches_activation_checkpointing_on() -> None:
    assert parse(activation_checkpointing={}).checkpointing == "full"
    assert parse(activation_checkpointing=None).checkpointing == "none"
    assert parse(activation_checkpointing={"cpu_checkpointing": True}).keys.cpu_checkpointing


def test_with_precision_keeps_the_rest_and_checks_it_again() -> None:
    config = parse(zero_optimization={"stage": 2}, fp16={"enabled": True, "hysteresis": 3})
    assert config.with_precision("bf16").precision == "bf16"
    again = config.with_precision("bf16").with_precision("fp16")
    assert again.keys.fp16 is not None
    assert again.keys.fp16.hysteresis == 3
    with pytest.raises(ConfigError, match=r"my\.json with precision fp16: fp16 does not train at stage 0"):
        parse(bf16={"enabled": True}).with_precision("fp16")
