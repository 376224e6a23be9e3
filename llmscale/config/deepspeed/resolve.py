"""Build the dict for `deepspeed.initialize`: every "auto" is filled, every default that matters is explicit. No torch.

DeepSpeed changed defaults in 2026 (gradient_clipping 1.0, check_grad_overflow and pin_memory true) and may do so again,
and a run's saved config must describe how it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmscale.config.batch_plan import BatchPlan
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.rules import find_problems, ignored_keys, refusals
from llmscale.config.deepspeed.schema import (
    AUTO,
    Bf16,
    CheckpointingMode,
    DsFile,
    Dtype,
    Fp16,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
    Precision,
    Section,
    TorchAutocast,
)
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json


@dataclass(frozen=True)
class DsConfig:
    """ds_config that `parse_ds_config` has checked."""

    source: str
    """Name of the file, for messages."""
    keys: DsFile
    """Typed contents of the file; absent sections are None."""
    warnings: tuple[str, ...]
    """Messages about keys without effect."""

    @property
    def zero_stage(self) -> int:
        return self.keys.zero.stage

    @property
    def zero_hpz_partition_size(self) -> int:
        """Ranks of a group that keeps a second copy of the parameters; 1 without hpZ, and below stage 3."""
        return self.keys.zero.zero_hpz_partition_size if self.zero_stage == 3 else 1

    @property
    def precision(self) -> Precision:
        return self.keys.precision

    @property
    def fp16(self) -> Fp16 | None:
        """Settings of the loss scale; None in another precision."""
        return self.keys.fp16 if self.precision == "fp16" else None

    @property
    def offload_optimizer_device(self) -> OffloadDevice:
        return self.keys.offload_optimizer_device

    @property
    def offload_param_device(self) -> OffloadDevice:
        return self.keys.offload_param_device

    @property
    def checkpointing(self) -> CheckpointingMode:
        """`full` if the section is present, else `none`: DeepSpeed has no section for `selective`."""
        return "none" if self.keys.activation_checkpointing is None else "full"

    @property
    def cpu_checkpointing(self) -> bool:
        """True if saved activations are kept in host memory."""
        section = self.keys.activation_checkpointing
        return section is not None and section.cpu_checkpointing

    @property
    def gradient_clipping(self) -> float | None:
        """Largest global gradient norm, 0 for no clipping; None if the file has no number."""
        clipping = self.keys.gradient_clipping
        return None if clipping is None or isinstance(clipping, str) else clipping

    def with_flags(self, precision: Precision | None, gradient_clipping: float | None) -> DsConfig:
        """Return the config with train.py's flags applied. Raises ConfigError if other keys forbid the precision."""
        ds = self if precision is None else self.with_precision(precision)
        if gradient_clipping is None:
            return ds
        return replace(ds, keys=ds.keys.model_copy(update={"gradient_clipping": gradient_clipping}))

    def with_precision(self, precision: Precision) -> DsConfig:
        """Return the config in another precision. Raises ConfigError if other keys forbid it."""
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
    """Return the unchecked JSON object of a file, or of the bundled file that `path` names. Raises ConfigError."""
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
    """Load and check a file, or the bundled file that `path` names. Raises ConfigError."""
    found = DS_CONFIGS.find(path)
    return parse_ds_config(load_ds_config(path), str(path) if found == path else found.name)


def _switch(section: Bf16 | Fp16 | TorchAutocast, enabled: bool) -> Section:
    return section.model_copy(update={"enabled": enabled})


def _refuse_first(source: str, problems: list[str]) -> None:
    if problems:
        more = f" (And {len(problems) - 1} more in this file.)" if len(problems) > 1 else ""
        raise ConfigError(f"{source}: {problems[0]}{more}")


DEFAULT_GRADIENT_CLIPPING = 1.0

#: DeepSpeed's default bucket, in elements. A bucket larger than the model wastes memory: stages 1 and 2 allocate all of
#: it in every backward pass, and stage 3 keeps it.
MAX_BUCKET_SIZE = 500_000_000

#: Interval that switches off DeepSpeed's log line. llmscale prints and times steps itself; DeepSpeed's throughput timer
#: would synchronise the device twice per step.
NEVER_PRINT = 10**9

#: Sections whose `pin_memory` page-locks host memory for copies to a GPU.
_OFFLOADS = ("offload_optimizer", "offload_param")


class ModelSize(Protocol):
    """Properties of a model that determine DeepSpeed's buffers."""

    @property
    def n_embd(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...


def resolve_ds_config(ds: DsConfig, model: ModelSize, plan: BatchPlan) -> dict[str, object]:
    """Return JSON values for `deepspeed.initialize` on GPUs, none of them "auto".

    Raises ConfigError if the file's batch sizes contradict the plan, or its hpZ group does not divide the ranks, or the
    ranks divide experts with keys that DeepSpeed cannot do it with.
    """
    _check_groups(ds, plan)
    if plan.ranks.expert_parallel_size > 1:
        _check_divided_experts(ds)
    keys = ds.keys
    config: dict[str, object] = keys.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    config.update(_batch_keys(ds, plan))
    config["gradient_clipping"] = DEFAULT_GRADIENT_CLIPPING if ds.gradient_clipping is None else ds.gradient_clipping
    config["zero_optimization"] = _zero_section(keys, model)
    config.update(_precision_sections(keys, plan.gradient_accumulation_steps))
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config.setdefault("steps_per_print", NEVER_PRINT)
    config.setdefault("wall_clock_breakdown", False)
    config.setdefault("timers", {"throughput": {"enabled": False, "synchronized": False}})
    return config


def without_pinned_memory(ds_config: Mapping[str, object]) -> dict[str, object]:
    """Return a resolved ds_config for a machine without GPUs, where host memory cannot be pinned."""
    zero = ds_config["zero_optimization"]
    assert isinstance(zero, dict)
    unpinned = {name: {**zero[name], "pin_memory": False} for name in _OFFLOADS if name in zero}
    return {**ds_config, "zero_optimization": {**zero, **unpinned}}


def _check_groups(ds: DsConfig, plan: BatchPlan) -> None:
    group, ranks = ds.zero_hpz_partition_size, plan.ranks.world_size
    if ranks % group:
        raise ConfigError(
            f"{ds.source}: zero_optimization.zero_hpz_partition_size {group} does not divide the {ranks} ranks. Set it "
            "to the number of GPUs per node, or delete it."
        )


def _check_divided_experts(ds: DsConfig) -> None:
    """Raise ConfigError for keys with which DeepSpeed trains divided experts wrongly, or not at all."""
    zero, stage = ds.keys.zero, ds.zero_stage
    refused = {
        "stage 0, whose norm and clipping leave out the other ranks' experts. Set stage to 1": stage == 0,
        "zero_hpz_partition_size, whose copies mix ranks with other experts. Delete it": ds.zero_hpz_partition_size > 1,
        f"reduce_scatter false at stage {stage}. Delete it": stage in (1, 2) and not zero.reduce_scatter,
        f"contiguous_gradients false at stage {stage}. Delete it": stage in (1, 2) and not zero.contiguous_gradients,
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{ds.source}: DeepSpeed cannot divide experts (--expert-parallel-size) with zero_optimization's "
                f"{reason}, or drop --expert-parallel-size."
            )


def _batch_keys(ds: DsConfig, plan: BatchPlan) -> dict[str, object]:
    """Return DeepSpeed's batch sizes. Raises ConfigError if a number in the file contradicts the plan."""
    planned = {
        # A file may have the batch itself, or DeepSpeed's number, as the ds_config.json of a run folder has.
        "train_batch_size": (plan.global_batch_size, plan.train_batch_size),
        "train_micro_batch_size_per_gpu": (plan.micro_batch_size,),
        "gradient_accumulation_steps": (plan.gradient_accumulation_steps,),
    }
    for name, values in planned.items():
        written = getattr(ds.keys, name)
        if written not in (None, AUTO, *values):
            raise ConfigError(
                f"{ds.source}: {name} {written} contradicts the batch plan's {values[0]}. Delete it, or change "
                "--global-batch-size and --micro-batch-size."
            )
    return {name: values[-1] for name, values in planned.items()}


def _zero_section(keys: DsFile, model: ModelSize) -> dict[str, object]:
    stage = keys.zero.stage
    bucket = min(MAX_BUCKET_SIZE, model.num_parameters + model.num_parameters % 2)
    section: dict[str, object] = {"stage": stage}
    if stage > 0:
        section |= {
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "overlap_comm": stage == 3,
        }
    if stage in (1, 2):
        section |= {"allgather_bucket_size": bucket, "round_robin_gradients": False}
    if stage == 3:
        names = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        section |= {name: getattr(keys.zero, name) for name in names}
        section |= {
            name: getattr(keys.zero, name)
            for name in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        }
    section |= keys.zero.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    for name, value in _auto_sizes(model.n_embd).items():
        if section.get(name) == AUTO:
            section[name] = value
    for name in _OFFLOADS:
        section.pop(name, None)
        offload = getattr(keys.zero, name)
        if offload is not None and offload.device != "none":
            section[name] = _offload_section(offload)
    return section


def _auto_sizes(n_embd: int) -> dict[str, int]:
    """Return the values for "auto", in elements, by the formulas of Hugging Face's Trainer."""
    return {
        "reduce_bucket_size": n_embd * n_embd,
        "stage3_prefetch_bucket_size": int(0.9 * n_embd * n_embd),
        "stage3_param_persistence_threshold": 10 * n_embd,
    }


def _offload_section(offload: OffloadOptimizer | OffloadParam) -> dict[str, object]:
    written = offload.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return {**written, "device": offload.device, "pin_memory": offload.pin_memory}


def _precision_sections(keys: DsFile, gradient_accumulation_steps: int) -> dict[str, object]:
    """Return the three precision sections, and the types in which gradients are reduced and accumulated."""
    precision = keys.precision
    sections: dict[str, object] = {name: {"enabled": False} for name in ("bf16", "fp16", "torch_autocast")}
    if precision == "bf16" and keys.bf16:
        sections["bf16"] = {**keys.bf16.model_dump(mode="json"), "enabled": True}
    if precision == "fp16":
        sections["fp16"] = {**(keys.fp16 or Fp16(enabled=True)).model_dump(mode="json"), "enabled": True}
    if precision == "autocast" and keys.torch_autocast:
        written = keys.torch_autocast.model_dump(mode="json", exclude_none=True)
        sections["torch_autocast"] = {**written, "enabled": True, "dtype": "bfloat16"}
    types = keys.data_types.model_dump(mode="json", exclude_none=True) if keys.data_types else {}
    sections["data_types"] = {"grad_accum_dtype": default_accumulation(keys, gradient_accumulation_steps), **types}
    sections["communication_data_type"] = keys.communication_data_type or default_communication(keys)
    return sections


def default_communication(keys: DsFile) -> Dtype:
    """Return the default type for exchanging gradients: the type of the matrix products.

    Under autocast gradients already have bf16's rounding errors, so fp32 would only double the traffic. Stages 1 to 3
    divide by the number of ranks before they sum, so in fp16 no sum exceeds its largest term.
    """
    return "bf16" if keys.precision == "autocast" else keys.model_dtype


def default_accumulation(keys: DsFile, gradient_accumulation_steps: int) -> Dtype:
    """Return the default type for summing gradients over micro-batches.

    With several micro-steps it is fp32, because a sum of many 16-bit gradients loses small terms. With one micro-step
    nothing is summed, and it is fp32 only at stages 2 and 3: shards are small there, the step then needs no fp32 copy,
    and the peak stays the same. At stage 1 in bf16, fp32 selects another optimizer class of DeepSpeed with an unsharded
    buffer of 4 bytes per parameter. At stage 0 llmscale.engine.deepspeed_patches sums.
    """
    return "fp32" if keys.zero.stage >= 2 or gradient_accumulation_steps > 1 else keys.model_dtype
