"""Build the dict for `deepspeed.initialize`: every "auto" is filled, every default that matters is explicit. No torch.

DeepSpeed changed defaults in 2026 (gradient_clipping 1.0, check_grad_overflow and pin_memory true) and may do so again,
and a run's saved config must describe how it was trained.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from llmscale.config.batch_plan import BatchPlan, divisors
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.foreign import Change, apply_edits, read_foreign
from llmscale.config.deepspeed.rules import find_problems, ignored_keys, refusals
from llmscale.config.deepspeed.schema import (
    AUTO,
    Bf16,
    CheckpointingMode,
    DsFile,
    Dtype,
    Fp16,
    OffloadOptimizer,
    OffloadParam,
    Precision,
    Section,
    TorchAutocast,
    ZeroOptimization,
)
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json

#: Keys of a ds_config for the sequences of a step: global batch, micro-batch, accumulation.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DEFAULT_GRADIENT_CLIPPING = 1.0
#: DeepSpeed's default bucket, in elements. A bucket larger than the model wastes memory: stages 1 and 2 allocate all of
#: it in every backward pass, and stage 3 keeps it.
MAX_BUCKET_SIZE = 500_000_000
#: Interval that switches off DeepSpeed's log line. llmscale prints and times steps itself; DeepSpeed's throughput timer
#: would synchronise the device twice per step.
NEVER_PRINT = 10**9
#: Most times that `fix_ds_config` reads what it has written: an edit may bring up another problem.
_MOST_ROUNDS = 8
#: Sections whose `pin_memory` page-locks host memory for copies to a GPU.
_OFFLOADS = ("offload_optimizer", "offload_param")
#: Sizes of stage 3 that are written out.
_STAGE_3_SIZES = (
    "sub_group_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


@dataclass(frozen=True)
class DsConfig:
    """ds_config that `parse_ds_config` has checked."""

    source: str
    """Name of the file, for messages."""
    keys: DsFile
    """Typed contents of the file; absent sections are None."""
    warnings: tuple[str, ...]
    """Messages about keys without effect, and about those that are read in another way than written."""
    run_keys: Mapping[str, object] = field(default_factory=dict)
    """Keys of a run that the file sets: learning rate, schedule and the like."""
    scheduler_defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys of a run that its scheduler block leaves to DeepSpeed's defaults."""

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
    def checkpointing(self) -> CheckpointingMode:
        """`full` if the section is present, else `none`: DeepSpeed has no section for `selective`."""
        return "none" if self.keys.activation_checkpointing is None else "full"

    @property
    def gradient_clipping(self) -> float | None:
        """Largest global gradient norm, 0 for no clipping; None if the file has no number."""
        clipping = self.keys.gradient_clipping
        return None if clipping is None or isinstance(clipping, str) else clipping

    def with_flags(self, precision: Precision | None, gradient_clipping: float | None) -> DsConfig:
        """Return the config with train.py's flags applied. Raises ConfigError if other keys forbid the precision."""
        if precision is None:
            ds = self
        else:
            ds = self.with_precision(precision)
        if gradient_clipping is None:
            return ds
        return replace(ds, keys=ds.keys.model_copy(update={"gradient_clipping": gradient_clipping}))

    def batch(self, total: int | None, micro: int | None, default: int, groups: int) -> tuple[int, int | None]:
        """Return global batch and micro-batch, in sequences, for `groups` data-parallel ranks.

        The flags' `total` and `micro` go before the file. Two of the file's three numbers give the third. Where all
        three disagree, the accumulation gives way, and `batch_notices` has a message. A batch of neither flags nor
        file is a multiple of the micro-batch near `default`.
        """
        steps = _number(self.keys.gradient_accumulation_steps)
        total = total or _number(self.keys.train_batch_size)
        is_flag = micro is not None
        micro = micro or _number(self.keys.train_micro_batch_size_per_gpu)
        if total is None and steps is not None:
            micro = micro or max(1, default // (steps * groups))
            total = micro * steps * groups
        elif total is None:
            # A flag's micro-batch must divide the default, as it must without a file.
            if micro and not is_flag:
                total = max(1, default // micro) * micro
            else:
                total = default
        elif micro is None and steps is not None:
            # The smallest needs the fewest fillers.
            sizes = (size for size in divisors(total) if -(-total // (size * groups)) == steps)
            micro = next(sizes, None)
        return total, micro

    def batch_notices(self, plan: BatchPlan) -> list[str]:
        """Return a message for each batch size of the file that a flag or the number of ranks overrides."""
        # A file may have the batch itself, or DeepSpeed's number, as the ds_config.json of a run folder has.
        is_deepspeeds = self.keys.train_batch_size == plan.train_batch_size
        batch = plan.train_batch_size if is_deepspeeds else plan.global_batch_size
        planned = (batch, plan.micro_batch_size, plan.gradient_accumulation_steps)
        return [
            f"{name} {written} of {self.source} gives way to {value}: {plan.describe()}."
            for name, value in zip(BATCH_KEYS, planned, strict=True)
            if (written := _number(getattr(self.keys, name))) not in (None, value)
        ]

    def with_precision(self, precision: Precision) -> DsConfig:
        """Return the config in another precision. Raises ConfigError if other keys forbid it."""
        keys = self.keys
        sections: dict[str, tuple[Precision, Section]] = {
            "bf16": ("bf16", keys.bf16 or Bf16(enabled=False)),
            "fp16": ("fp16", keys.fp16 or Fp16(enabled=False)),
            "torch_autocast": ("autocast", keys.torch_autocast or TorchAutocast(enabled=False)),
        }
        keys = keys.model_copy(
            update={
                name: section.model_copy(update={"enabled": own == precision})
                for name, (own, section) in sections.items()
            }
        )
        _raise_for(f"{self.source} with precision {precision}", [refusal.text for refusal in refusals(keys)])
        return replace(self, keys=keys)


def _number(written: int | str | None) -> int | None:
    return written if isinstance(written, int) else None


def load_ds_config(path: Path) -> dict[str, object]:
    """Return the unchecked JSON object of a file, or of the bundled file that `path` names. Raises ConfigError."""
    file = DS_CONFIGS.find(path)
    try:
        return load_json(file, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), f"ds_config {file}")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"ds_config {path} does not exist.{DS_CONFIGS.why_missing(path)}") from None


def parse_ds_config(config: dict[str, object], source: str) -> DsConfig:
    """Check every key, type, value and combination. Raises ConfigError with all problems, prefixed with `source`."""
    reading = read_foreign(config)
    if problems := [problem.text for problem in find_problems(reading)]:
        fix = f"`llmscale doctor --ds {source} --fixed OUT` writes the file that llmscale takes."
        _raise_for(source, problems, fix)
    keys = DsFile.model_validate(reading.config)
    notices = (notice.text for notice in reading.notices)
    warnings = (*notices, *ignored_keys(keys))
    return DsConfig(source, keys, warnings, reading.run_keys, reading.scheduler_defaults)


def fix_ds_config(config: Mapping[str, object]) -> tuple[dict[str, object], list[Change]]:
    """Return the file that llmscale takes in place of `config`, and what was changed.

    Entries that are taken as flags stay. Raises ConfigError if a problem remains.
    """
    fixed = copy.deepcopy(dict(config))
    changes = list[Change]()
    for _ in range(_MOST_ROUNDS):
        reading = read_foreign(fixed)
        todo = [*find_problems(reading), *(change for change in (*reading.notices, *reading.silent) if change.edits)]
        if not todo:
            return fixed, changes
        for change in todo:
            apply_edits(fixed, change.edits)
        changes += todo
    raise ConfigError(f"no edits make a ds_config of this file: {todo[0].text}")


def read_ds_config(path: Path) -> DsConfig:
    """Load and check a file, or the bundled file that `path` names. Raises ConfigError."""
    file = DS_CONFIGS.find(path)
    return parse_ds_config(load_ds_config(path), str(path) if file == path else file.name)


def _raise_for(source: str, problems: list[str], fix: str = "") -> None:
    """Raise ConfigError with all problems, if there are any; `fix` follows several."""
    if len(problems) == 1:
        raise ConfigError(f"{source}: {problems[0]}")
    if problems:
        listed = " ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
        raise ConfigError(f"{source}: {len(problems)} problems. {listed} {fix}".rstrip())


class ModelSize(Protocol):
    """Properties of a model that determine DeepSpeed's buffers."""

    @property
    def n_embd(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...


def resolve_ds_config(ds: DsConfig, model: ModelSize, plan: BatchPlan) -> dict[str, object]:
    """Return JSON values for `deepspeed.initialize` on GPUs, none of them "auto".

    Raises ConfigError if the file's hpZ group does not divide the ranks, or the ranks divide experts with keys that
    DeepSpeed cannot do it with.
    """
    _check_groups(ds, plan)
    keys = ds.keys
    config: dict[str, object] = keys.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    config["train_micro_batch_size_per_gpu"] = plan.micro_batch_size
    config["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    config["train_batch_size"] = plan.train_batch_size
    config["gradient_clipping"] = DEFAULT_GRADIENT_CLIPPING if ds.gradient_clipping is None else ds.gradient_clipping
    config["zero_optimization"] = _zero_section(keys.zero, model)
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
    """Raise ConfigError for groups that do not divide the ranks, and for keys with which DeepSpeed trains divided
    experts wrongly, or not at all."""
    group = ds.zero_hpz_partition_size
    ranks = plan.ranks
    if ranks.world_size % group:
        raise ConfigError(
            f"{ds.source}: zero_optimization.zero_hpz_partition_size {group} does not divide the {ranks.world_size} "
            "ranks. Set it to the number of GPUs per node, or delete it."
        )
    if ranks.expert_parallel_size == 1:
        return
    zero = ds.keys.zero
    stage = ds.zero_stage
    refused = {
        "stage 0, whose norm and clipping leave out the other ranks' experts. Set stage to 1": stage == 0,
        "zero_hpz_partition_size, whose copies mix ranks with other experts. Delete it": group > 1,
        f"reduce_scatter false at stage {stage}. Delete it": stage in (1, 2) and not zero.reduce_scatter,
        f"contiguous_gradients false at stage {stage}. Delete it": stage in (1, 2) and not zero.contiguous_gradients,
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{ds.source}: DeepSpeed cannot divide experts (--expert-parallel-size) with zero_optimization's "
                f"{reason}, or drop --expert-parallel-size."
            )


def _zero_section(zero: ZeroOptimization, model: ModelSize) -> dict[str, object]:
    """Return the section with the keys that its stage reads. "auto" has the values of Hugging Face's Trainer."""
    stage = zero.stage
    n_embd = model.n_embd
    bucket = min(MAX_BUCKET_SIZE, model.num_parameters + model.num_parameters % 2)
    section: dict[str, object] = {"stage": stage}
    if stage > 0:
        section |= {"contiguous_gradients": True, "reduce_scatter": True}
        section |= {"reduce_bucket_size": bucket, "overlap_comm": stage == 3}
    if stage in (1, 2):
        section |= {"allgather_bucket_size": bucket, "round_robin_gradients": False}
    if stage == 3:
        section |= {name: getattr(zero, name) for name in _STAGE_3_SIZES}
    section |= zero.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    sizes = {
        "reduce_bucket_size": n_embd * n_embd,
        "stage3_prefetch_bucket_size": int(0.9 * n_embd * n_embd),
        "stage3_param_persistence_threshold": 10 * n_embd,
    }
    section |= {name: size for name, size in sizes.items() if section.get(name) == AUTO}
    for name in _OFFLOADS:
        section.pop(name, None)
        offload: OffloadOptimizer | OffloadParam | None = getattr(zero, name)
        if offload is not None and offload.device != "none":
            written = offload.model_dump(mode="json", exclude_unset=True, exclude_none=True)
            section[name] = {**written, "device": offload.device, "pin_memory": offload.pin_memory}
    return section


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
    if keys.data_types:
        types = keys.data_types.model_dump(mode="json", exclude_none=True)
    else:
        types = {}
    sections["data_types"] = {"grad_accum_dtype": _default_accumulation(keys, gradient_accumulation_steps), **types}
    # The type of the matrix products. Under autocast gradients already have bf16's rounding errors, so fp32 would only
    # double the traffic. Stages 1 to 3 divide by the number of ranks before they sum, so in fp16 no sum exceeds its
    # largest term.
    default: Dtype = "bf16" if precision == "autocast" else keys.model_dtype
    sections["communication_data_type"] = keys.communication_data_type or default
    return sections


def _default_accumulation(keys: DsFile, gradient_accumulation_steps: int) -> Dtype:
    """Return the default type for summing gradients over micro-batches.

    With several micro-steps it is fp32, because a sum of many 16-bit gradients loses small terms. With one micro-step
    nothing is summed, and the losses are the same bits in either type: the memory decides. At stages 2 and 3 shards are
    small, and with fp32 the step needs no fp32 copy. At stage 2 with offload_optimizer the host makes that copy, and
    fp32 would keep a shard on the GPU for nothing. At stage 1 in bf16, fp32 selects another optimizer class of
    DeepSpeed with an unsharded buffer of 4 bytes per parameter. At stage 0 llmscale.engine.deepspeed_patches sums.
    bf16 states get bf16 gradients, so that fp32 serves only sums; at stage 1 that other class would keep fp32 states.
    """
    if keys.has_bf16_states:
        if gradient_accumulation_steps > 1 and keys.zero.stage >= 2:
            return "fp32"
        return "bf16"
    is_on_host = keys.zero.stage == 2 and keys.offload_optimizer_device != "none"
    sums_in_fp32 = gradient_accumulation_steps > 1 or (keys.zero.stage >= 2 and not is_on_host)
    return "fp32" if sums_in_fp32 else keys.model_dtype
