"""The schema against the installed DeepSpeed: every key it reads is known, every default is its default."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import BaseModel

from llmscale.config.deepspeed import schema as ds_schema
from llmscale.config.deepspeed.foreign import ENTRIES, read_foreign
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.deepspeed.schema import DsFile, Section

deepspeed = pytest.importorskip("deepspeed")

#: Entries with a second name, or that are taken as keys of a run.
READ = {
    "bfloat16",
    "optimizer",
    "scheduler",
    "wandb",
    "curriculum_learning",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_use_pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
}


def known(prefix: str, section: type[Section]) -> set[str]:
    """Names that llmscale supports or refuses directly below a dotted prefix."""
    below = f"{prefix}." if prefix else ""
    refused = {path.removeprefix(below) for path in READ | ENTRIES.keys() if path.startswith(below)}
    return set(section.model_fields) | {name.split(".")[0] for name in refused}


def test_what_deepspeed_removed_is_refused_with_a_reason() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= READ | ENTRIES.keys()
    assert {f"zero_optimization.{name}" for name in _REMOVED_ZERO_CONFIG_KEYS} <= READ | ENTRIES.keys()


def pydantic_sections() -> list[tuple[str, type[Section], type[BaseModel]]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    zero = "zero_optimization"
    return [
        (zero, ds_schema.ZeroOptimization, DeepSpeedZeroConfig),
        (f"{zero}.offload_optimizer", ds_schema.OffloadOptimizer, DeepSpeedZeroOffloadOptimizerConfig),
        (f"{zero}.offload_param", ds_schema.OffloadParam, DeepSpeedZeroOffloadParamConfig),
        ("bf16", ds_schema.Bf16, DeepSpeedBF16Config),
        ("fp16", ds_schema.Fp16, DeepSpeedFP16Config),
        ("comms_logger", ds_schema.CommsLogger, CommsLoggerConfig),
        ("tensorboard", ds_schema.FileMonitor, TensorBoardConfig),
        ("csv_monitor", ds_schema.FileMonitor, CSVConfig),
        ("timers.throughput", ds_schema.ThroughputTimer, DeepSpeedThroughputTimerConfig),
    ]


@pytest.mark.parametrize(("path", "ours", "theirs"), pydantic_sections(), ids=lambda value: str(value)[:40])
def test_a_section_has_deepspeeds_keys_and_defaults(path: str, ours: type[Section], theirs: type[BaseModel]) -> None:
    from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS

    fields = {field.alias or name: field for name, field in theirs.model_fields.items()}
    removed = set(_REMOVED_ZERO_CONFIG_KEYS) if path == "zero_optimization" else set()
    assert known(path, ours) - removed == set(fields)
    for name, field in ours.model_fields.items():
        if not field.is_required():
            default = fields[name].default
            assert field.default == (() if default == [] else default), name


@pytest.mark.parametrize(("path", "ours", "theirs"), pydantic_sections(), ids=lambda value: str(value)[:40])
def test_no_name_of_a_key_that_deepspeed_reads_is_called_unread(
    path: str, ours: type[Section], theirs: type[BaseModel]
) -> None:
    """DeepSpeed reads a field under its own name, too, not only under its alias."""
    for field, declared in theirs.model_fields.items():
        for name in {field, declared.alias or field}:
            section: dict[str, object] = {name: declared.get_default(call_default_factory=True)}
            if "enabled" in ours.model_fields:
                section = {"enabled": True, **section}
            config: dict[str, object] = section
            for parent in reversed(path.split(".")):
                config = {parent: config}
            config.setdefault("zero_optimization", {})["stage"] = 1  # type: ignore[index]
            assert not [problem.text for problem in find_problems(read_foreign(config)) if "not a key" in problem.text]


class Recorder(dict[str, object]):
    """A dict that notes which keys are asked for, and hands out recorders for its sections."""

    def __init__(self, asked: set[str], prefix: str = "", sections: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.asked, self.prefix = asked, prefix
        for name, section in (sections or {}).items():
            self[name] = Recorder(asked, f"{prefix}{name}.", section) if isinstance(section, dict) else section

    def __copy__(self) -> Recorder:
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def __getitem__(self, key: str) -> object:
        self.asked.add(f"{self.prefix}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        self.asked.add(f"{self.prefix}{key}")
        return super().get(key, default)

    def keys(self) -> Recorder:  # type: ignore[override]
        """`in config.keys()` is asked for through __contains__ as well."""
        return self


def test_every_key_that_deepspeed_asks_for_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    plain_sections = ("activation_checkpointing", "aio", "data_types", "flops_profiler", "torch_autocast")
    asked: set[str] = set()
    DeepSpeedConfig(Recorder(asked, sections={"train_batch_size": 1, **{name: {} for name in plain_sections}}))
    assert "zero_optimization" in asked
    assert "torch_autocast.enabled" in asked
    top = {key.split(".")[0] for key in asked}
    assert top - known("", DsFile) == set()
    sections: dict[str, type[Section]] = {
        "activation_checkpointing": ds_schema.ActivationCheckpointing,
        "aio": ds_schema.Aio,
        "data_types": ds_schema.DataTypes,
        "flops_profiler": ds_schema.FlopsProfiler,
        "torch_autocast": ds_schema.TorchAutocast,
    }
    for name, section in sections.items():
        read = {key.split(".")[1] for key in asked if key.startswith(f"{name}.")}
        assert read
        assert read <= known(name, section), name
