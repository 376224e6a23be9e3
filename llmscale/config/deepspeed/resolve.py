"""The dict that goes to `deepspeed.initialize`: every "auto" filled, every default that matters written out.

DeepSpeed's defaults moved in 2026 (gradient_clipping 1.0, check_grad_overflow and pin_memory true) and may
move again; a run's saved config must say what it trained with. Pure functions, no torch.
"""

from __future__ import annotations

from llmscale.config.deepspeed.fields import AUTO
from llmscale.config.deepspeed.schema import DsConfig
from llmscale.config.deepspeed.sections import DsFile, Dtype, Fp16, OffloadOptimizer, OffloadParam, Precision
from llmscale.errors import ConfigError

DEFAULT_GRADIENT_CLIPPING = 1.0

#: DeepSpeed's own default bucket, in elements. One larger than the model only wastes memory: stages 1 and 2
#: allocate the whole bucket in every backward pass, stage 3 keeps it.
MAX_BUCKET_SIZE = 500_000_000

#: llmscale prints and times its own steps; DeepSpeed's throughput timer would synchronise the device twice
#: in each.
NEVER_PRINT = 10**9


def resolve_ds_config(
    ds: DsConfig,
    *,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    global_batch_size: int,
    world_size: int,
    n_embd: int,
    num_parameters: int,
    has_gpu: bool,
    precision_override: Precision | None = None,
    gradient_clipping: float | None = None,
) -> dict[str, object]:
    """Plain JSON values for `deepspeed.initialize`, none of them "auto".

    `gradient_clipping` None leaves the file's value, or 1.0. `has_gpu` decides whether host memory is
    pinned. Raises ConfigError when the file's batch sizes contradict the plan, or its keys the precision.
    """
    if global_batch_size != micro_batch_size * gradient_accumulation_steps * world_size:
        raise ConfigError(
            f"global_batch_size {global_batch_size} is not micro_batch_size {micro_batch_size} x "
            f"gradient_accumulation_steps {gradient_accumulation_steps} x world_size {world_size}."
        )
    chosen = ds if precision_override is None else ds.with_precision(precision_override)
    keys = chosen.keys
    config: dict[str, object] = keys.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    config.update(
        _batch_keys(
            ds,
            train_batch_size=global_batch_size,
            train_micro_batch_size_per_gpu=micro_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
    )
    if gradient_clipping is None:
        gradient_clipping = ds.gradient_clipping
    config["gradient_clipping"] = DEFAULT_GRADIENT_CLIPPING if gradient_clipping is None else gradient_clipping
    config["zero_optimization"] = _zero_section(keys, n_embd, num_parameters, has_gpu)
    config.update(_precision_sections(keys, gradient_accumulation_steps))
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config.setdefault("steps_per_print", NEVER_PRINT)
    config.setdefault("wall_clock_breakdown", False)
    config.setdefault("timers", {"throughput": {"enabled": False, "synchronized": False}})
    return config


def _batch_keys(ds: DsConfig, **planned: int) -> dict[str, object]:
    """The plan's batch sizes. A number in the file must agree with them."""
    for name, value in planned.items():
        written = getattr(ds.keys, name)
        if written not in (None, AUTO, value):
            raise ConfigError(
                f"{ds.source}: {name} {written} contradicts the batch plan's {value}. Delete it, or change "
                "--global-batch-size and --micro-batch-size."
            )
    return dict(planned)


def _zero_section(keys: DsFile, n_embd: int, num_parameters: int, has_gpu: bool) -> dict[str, object]:
    stage = keys.zero.stage
    bucket = min(MAX_BUCKET_SIZE, num_parameters + num_parameters % 2)
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
    for name, value in _auto_sizes(n_embd).items():
        if section.get(name) == AUTO:
            section[name] = value
    for name in ("offload_optimizer", "offload_param"):
        section.pop(name, None)
        offload = getattr(keys.zero, name)
        if offload is not None and offload.device != "none":
            section[name] = _offload_section(offload, has_gpu)
    return section


def _auto_sizes(n_embd: int) -> dict[str, int]:
    """Elements, as Hugging Face's Trainer fills them from the hidden size."""
    return {
        "reduce_bucket_size": n_embd * n_embd,
        "stage3_prefetch_bucket_size": int(0.9 * n_embd * n_embd),
        "stage3_param_persistence_threshold": 10 * n_embd,
    }


def _offload_section(offload: OffloadOptimizer | OffloadParam, has_gpu: bool) -> dict[str, object]:
    """Pinned memory is for copies to a GPU; without one there is nothing to pin it for."""
    written = offload.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return {**written, "device": offload.device, "pin_memory": offload.pin_memory and has_gpu}


def _precision_sections(keys: DsFile, gradient_accumulation_steps: int) -> dict[str, object]:
    """The three precision sections, and the types in which gradients are reduced and accumulated."""
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
    sections["communication_data_type"] = keys.communication_data_type or keys.model_dtype
    return sections


def default_accumulation(keys: DsFile, gradient_accumulation_steps: int) -> Dtype:
    """The type gradients are summed in over micro-batches when the file does not say.

    fp32 wherever there is more than one: a sum of many 16-bit gradients loses its small terms. With one micro-step
    there is no sum, and it is fp32 only at stages 2 and 3, where the peak is the same: the shards are small, and the
    step needs no fp32 copy. At stage 1 in bf16 it is another optimizer class of DeepSpeed's, whose unsharded buffer
    costs 4 bytes per parameter; at stage 0 llmscale.engine.gradient_sums sums.
    """
    return "fp32" if keys.zero.stage >= 2 or gradient_accumulation_steps > 1 else keys.model_dtype
