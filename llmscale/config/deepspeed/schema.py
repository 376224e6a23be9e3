"""Read a ds_config and refuse, in one line, what DeepSpeed would ignore, misread or crash on. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.problems import find_problems
from llmscale.config.deepspeed.rules import ignored_keys, refusals
from llmscale.config.deepspeed.sections import (
    Bf16,
    CheckpointingMode,
    DsFile,
    Fp16,
    OffloadDevice,
    Precision,
    Section,
    TorchAutocast,
)
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json


@dataclass(frozen=True)
class DsConfig:
    """A ds_config that was checked against the closed schema."""

    source: str
    """The file's name, for messages."""
    keys: DsFile
    """What the file says, typed; absent sections are None."""
    warnings: tuple[str, ...]
    """Keys that have no effect, one sentence each."""

    @property
    def zero_stage(self) -> int:
        return self.keys.zero.stage

    @property
    def zero_hpz_partition_size(self) -> int:
        """Ranks of a group that keeps second copies of the parameters; 1: none does, as below stage 3."""
        return self.keys.zero.zero_hpz_partition_size if self.zero_stage == 3 else 1

    @property
    def precision(self) -> Precision:
        return self.keys.precision

    @property
    def fp16(self) -> Fp16 | None:
        """The loss-scale settings; None in another precision."""
        return self.keys.fp16 if self.precision == "fp16" else None

    @property
    def offload_optimizer_device(self) -> OffloadDevice:
        return self.keys.offload_optimizer_device

    @property
    def offload_param_device(self) -> OffloadDevice:
        return self.keys.offload_param_device

    @property
    def checkpointing(self) -> CheckpointingMode:
        """`full` when the section is there: DeepSpeed has none that means `selective`."""
        return "none" if self.keys.activation_checkpointing is None else "full"

    @property
    def cpu_checkpointing(self) -> bool:
        """Whether saved activations go to host memory."""
        section = self.keys.activation_checkpointing
        return section is not None and section.cpu_checkpointing

    @property
    def gradient_clipping(self) -> float | None:
        """Largest global gradient norm, 0 for no clipping; None when the file leaves it open."""
        clipping = self.keys.gradient_clipping
        return None if clipping is None or isinstance(clipping, str) else clipping

    def with_flags(self, precision: Precision | None, gradient_clipping: float | None) -> DsConfig:
        """The same config with what train.py's flags override. Raises ConfigError when its other keys do not allow
        the precision."""
        ds = self if precision is None else self.with_precision(precision)
        if gradient_clipping is None:
            return ds
        return replace(ds, keys=ds.keys.model_copy(update={"gradient_clipping": gradient_clipping}))

    def with_precision(self, precision: Precision) -> DsConfig:
        """The same config in another precision. Raises ConfigError when its other keys do not allow it."""
        bf16, fp16, autocast = self.keys.bf16, self.keys.fp16, self.keys.torch_autocast
        keys = self.keys.model_copy(
            update={
                "bf16": _switch(bf16 or Bf16(enabled=False), precision == "bf16"),
                "fp16": _switch(fp16 or Fp16(enabled=False), precision == "fp16"),
                "torch_autocast": _switch(autocast or TorchAutocast(enabled=False), precision == "autocast"),
            }
        )
        _refuse_first(f"{self.source} with precision {precision}", list(refusals(keys)))
        return replace(self, keys=keys)


def load_ds_config(path: Path) -> dict[str, object]:
    """The JSON object in a file, or in the one of llmscale's own that `path` names, not yet checked. Raises
    ConfigError."""
    found = DS_CONFIGS.find(path)
    try:
        return load_json(found, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), f"ds_config {found}")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"ds_config {path} does not exist.{DS_CONFIGS.why_missing(path)}") from None


def parse_ds_config(config: dict[str, object], source: str) -> DsConfig:
    """Check every key, type, value and combination. Raises ConfigError, prefixed with `source`."""
    _refuse_first(source, find_problems(config))
    keys = DsFile.model_validate(config)
    return DsConfig(source, keys, tuple(ignored_keys(keys)))


def read_ds_config(path: Path) -> DsConfig:
    """Load and check a file, or the one of llmscale's own that `path` names. Raises ConfigError."""
    found = DS_CONFIGS.find(path)
    return parse_ds_config(load_ds_config(path), str(path) if found == path else found.name)


def _switch(section: Bf16 | Fp16 | TorchAutocast, enabled: bool) -> Section:
    return section.model_copy(update={"enabled": enabled})


def _refuse_first(source: str, problems: list[str]) -> None:
    if problems:
        more = f" (And {len(problems) - 1} more in this file.)" if len(problems) > 1 else ""
        raise ConfigError(f"{source}: {problems[0]}{more}")
