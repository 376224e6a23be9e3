"""The ways to lay a training run out: ZeRO stage x offload x activation checkpointing, as ds_configs. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode, OffloadDevice, Precision
from llmscale.errors import ConfigError

STAGES = (0, 1, 2, 3)
#: (optimizer states, parameters), from the fastest to the smallest on the GPU.
OFFLOADS: tuple[tuple[OffloadDevice, OffloadDevice], ...] = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "nvme"),
)
#: From the fastest to the smallest.
CHECKPOINTING: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
#: As in ds_configs/zero3_nvme.json: a folder on the local disk of every node, to be changed by the user.
DEFAULT_NVME_PATH = "/local_nvme"


@dataclass(frozen=True)
class Strategy:
    """What a ds_config and `--activation-checkpointing` say about memory."""

    zero_stage: int
    offload_optimizer: OffloadDevice
    offload_param: OffloadDevice
    checkpointing: CheckpointingMode
    zero_hpz_partition_size: int = 1
    """Ranks that together keep a second copy of the parameters; 1: none do."""

    @property
    def stage_words(self) -> str:
        """`3`, or `3 hpZ`."""
        return f"{self.zero_stage}{' hpZ' if self.zero_hpz_partition_size > 1 else ''}"

    @property
    def offload(self) -> str:
        """What is not on the GPU, in a word or two."""
        if self.offload_optimizer == self.offload_param == "none":
            return "-"
        if self.offload_param == "none":
            return f"optim {self.offload_optimizer}"
        if self.offload_optimizer == "none":
            return f"param {self.offload_param}"
        if self.offload_optimizer == self.offload_param:
            return f"both {self.offload_param}"
        return f"optim {self.offload_optimizer}, param {self.offload_param}"

    def describe(self) -> str:
        """In a sentence's words."""
        parts = [f"ZeRO stage {self.zero_stage}"]
        if self.zero_hpz_partition_size > 1:
            parts.append(f"hpZ within {self.zero_hpz_partition_size} GPUs")
        if self.offload != "-":
            parts.append(f"offload: {self.offload}")
        parts.append("no recomputation" if self.checkpointing == "none" else f"{self.checkpointing} checkpointing")
        return ", ".join(parts)


def strategy_of(ds: DsConfig, checkpointing: CheckpointingMode) -> Strategy:
    """Where a ds_config stands among the strategies."""
    devices = (ds.offload_optimizer_device, ds.offload_param_device)
    return Strategy(ds.zero_stage, *devices, checkpointing, ds.zero_hpz_partition_size)


def all_strategies(hpz_ranks: int = 1) -> list[Strategy]:
    """Every stage with every offload and checkpointing mode, legal or not; stage 3 also with hpZ in groups of
    `hpz_ranks`."""
    stages = [(stage, 1) for stage in STAGES] + [(3, hpz_ranks)] * (hpz_ranks > 1)
    return [
        Strategy(stage, *offload, mode, group)
        for (stage, group), offload, mode in itertools.product(stages, OFFLOADS, CHECKPOINTING)
    ]


def strategy_ds_config(
    strategy: Strategy, precision: Precision, nvme_path: str = DEFAULT_NVME_PATH
) -> dict[str, object]:
    """The ds_config file of a strategy, as in ds_configs/: what is not in it is llmscale's default.

    `selective` checkpointing is no key of DeepSpeed's: it is train.py's --activation-checkpointing.
    """
    return _with_strategy({**_precision_section(precision)}, strategy, nvme_path)


def build_strategy(strategy: Strategy, precision: Precision, nvme_path: str = DEFAULT_NVME_PATH) -> DsConfig | None:
    """The strategy's ds_config, checked; None when DeepSpeed cannot train it (llmscale.config.deepspeed.rules)."""
    return _checked(strategy_ds_config(strategy, precision, nvme_path), f"stage {strategy.zero_stage}")


def legal_strategies(
    precision: Precision, nvme_path: str, modes: Sequence[CheckpointingMode], hpz_ranks: int = 1
) -> Iterator[tuple[DsConfig, CheckpointingMode]]:
    """The ds_config of every strategy with one of these checkpointing modes that DeepSpeed can train."""
    for strategy in all_strategies(hpz_ranks):
        ds = build_strategy(strategy, precision, nvme_path) if strategy.checkpointing in modes else None
        if ds is not None:
            yield ds, strategy.checkpointing


def change_strategy(ds: DsConfig, strategy: Strategy) -> DsConfig | None:
    """A user's ds_config with another strategy and everything else kept; None when it cannot train."""
    keys = cast("dict[str, object]", ds.keys.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return _checked(_with_strategy(keys, strategy, DEFAULT_NVME_PATH), ds.source)


def _with_strategy(keys: dict[str, object], strategy: Strategy, nvme_path: str) -> dict[str, object]:
    changed = dict(keys)
    written = changed.pop("zero_optimization", {})
    zero = dict(cast("dict[str, object]", written)) | {"stage": strategy.zero_stage}
    zero.pop("zero_hpz_partition_size", None)
    if strategy.zero_hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = strategy.zero_hpz_partition_size
    devices = {"offload_optimizer": strategy.offload_optimizer, "offload_param": strategy.offload_param}
    for name, device in devices.items():
        section = cast("dict[str, object]", zero.pop(name, {}))
        if device == "none":
            continue
        if section.get("device") != device:
            section = {"device": device} | ({"nvme_path": nvme_path} if device == "nvme" else {})
        zero[name] = section
    checkpointing = changed.pop("activation_checkpointing", None)
    changed = {"zero_optimization": zero, **changed}
    if strategy.checkpointing == "full":
        changed["activation_checkpointing"] = checkpointing or {"cpu_checkpointing": False}
    return changed


def _precision_section(precision: Precision) -> dict[str, object]:
    if precision == "fp32":
        return {}
    return {"torch_autocast" if precision == "autocast" else precision: {"enabled": True}}


def _checked(config: dict[str, object], source: str) -> DsConfig | None:
    try:
        return parse_ds_config(config, source)
    except ConfigError:
        return None
