"""Find the keys of a ds_config that make DeepSpeed 0.19.8 crash, or train something else than written.

`find_problems` returns the errors of a file, `ignored_keys` the keys without effect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmscale.config.deepspeed.schema import (
    AUTO,
    DsFile,
    OffloadOptimizer,
    OffloadParam,
    Section,
    ZeroOptimization,
    show,
)
from llmscale.config.optimizers import ADAMW
from llmscale.suggestions import describe_invalid, did_you_mean

_REMOVED = "DeepSpeed removed it in 2026. Delete it."
_OWN_LOOP = "llmscale counts micro-batches itself. Delete it."
_CPU_ADAM = "it needs DeepSpeed's own CPU Adam, llmscale passes torch.optim.AdamW. Delete it."
_QUANTISED = "ranks then exchange rounded numbers, which changes the loss curve. Delete it."
_PARALLELISM = "llmscale is data parallel only (ZeRO). Delete it."
_CHECKPOINT_ONLY = "it configures DeepSpeed's own checkpoints, llmscale writes others. Delete it."
_NO_BUFFERS = "the GPT has no buffers to keep in another type. Delete it."
_DATA = "the order and shape of batches come from llmscale's data feed. Delete it."

#: Reason by dotted path. The path of a section refuses all its keys.
UNSUPPORTED: dict[str, str] = {
    "optimizer": "llmscale builds its own. Delete it and use --optimizer, --lr, --weight-decay, --beta1, "
    "--beta2, --eps.",
    "scheduler": "llmscale sets the learning rate itself. Delete it and use --schedule, --lr, --warmup-steps.",
    "checkpoint": "llmscale writes its own checkpoints, and a 'load_universal' left here makes the next "
    "restart read an old one. Delete it.",
    "datastates_ckpt": _CHECKPOINT_ONLY,
    "bfloat16": "it is the old name of 'bf16'. Rename it.",
    "wandb": "DeepSpeed would start a second wandb run. Delete it and use --wandb.",
    "comet": "metrics are in the run folder's metrics.jsonl. Delete it.",
    "managed_gradient_accumulation": _OWN_LOOP,
    "compile": "llmscale compiles the blocks itself, at every stage. Delete it and use --compile.",
    "autotuning": "use `llmscale estimate` to choose stage, offload and micro-batch. Delete it.",
    "data_efficiency": _DATA,
    "hybrid_engine": "it generates text during RLHF, llmscale pre-trains. Delete it.",
    "weight_quantization": "it is for inference. Delete it.",
    "pipeline": _PARALLELISM,
    "tensor_parallel": _PARALLELISM,
    "expert_parallel": _PARALLELISM,
    "sequence_parallel_size": "llmscale divides sequences itself. Delete it and use --sequence-parallel-size.",
    "data_parallel_size": _PARALLELISM,
    "seq_parallel_communication_data_type": _PARALLELISM,
    "use_data_before_expert_parallelism": _PARALLELISM,
    "allgather_size": "it belongs to a format that DeepSpeed gave up. Use zero_optimization.allgather_bucket_size.",
    "nebula": _REMOVED,
    "compression_training": _REMOVED,
    "amp": "DeepSpeed removed Apex AMP in 2026. Use 'bf16', 'fp16' or 'torch_autocast'.",
    "quantize_training": _REMOVED,
    "sparse_gradients": _REMOVED,
    "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED,
    "elasticity": "DeepSpeed removed it in 2026. Delete it: llmscale resumes a run at any legal world size.",
    "graph_harvesting": _REMOVED,
    "curriculum_learning": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
    "zero_optimization.cpu_offload": 'it is deprecated. Write "offload_optimizer": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_param": 'it is deprecated. Write "offload_param": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_use_pin_memory": "it is deprecated. Write 'pin_memory' in the offload section.",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "it is deprecated. Rename it to "
    "'stage3_gather_16bit_weights_on_model_save'.",
    "zero_optimization.legacy_stage1": "DeepSpeed stops with an error when it is true. Delete it.",
    "zero_optimization.elastic_checkpoint": _CHECKPOINT_ONLY,
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINT_ONLY,
    "zero_optimization.compute_grad_norm": "llmscale clips by and logs the gradient norm. Delete it.",
    "zero_optimization.zenflow": _CPU_ADAM,
    "zero_optimization.zero_quantized_weights": _QUANTISED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_optimization.zero_quantized_gradients": _QUANTISED,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it is for DeepSpeed's Muon, and "
    "--optimizer muon is llmscale's own. Delete it.",
    "zero_optimization.leaf_module": "it is for mixtures of experts. Delete it.",
    "zero_optimization.offload_optimizer.super_offload": _CPU_ADAM,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _CPU_ADAM,
    "fp16.fp16_master_weights_and_grads": _CPU_ADAM,
    "bf16.bf16_master_weights_and_grads": "checkpoints hold an fp32 master copy of the weights. Delete it.",
    "bf16.bf16_optimizer_states": "checkpoints hold fp32 moments. Delete it.",
    "data_types.buffer_dtype": _NO_BUFFERS,
    "data_types.keep_in_fp32_modules": _NO_BUFFERS,
}


_EVERY_STAGE = frozenset({1, 2, 3})
_FLAT_STAGES = frozenset({1, 2})
_STAGE_3 = frozenset({3})
_NO_STAGE: frozenset[int] = frozenset()

#: Stages at which each key of zero_optimization has an effect.
EFFECTIVE_STAGES: dict[str, frozenset[int]] = {
    "contiguous_gradients": _EVERY_STAGE,
    "reduce_scatter": _EVERY_STAGE,
    "reduce_bucket_size": _EVERY_STAGE,
    "overlap_comm": _EVERY_STAGE,
    "allgather_bucket_size": _FLAT_STAGES,
    "use_multi_rank_bucket_allreduce": _FLAT_STAGES,
    "round_robin_gradients": _FLAT_STAGES,
    "parameter_alignment": _FLAT_STAGES,
    "ignore_unused_parameters": _FLAT_STAGES,
    "allgather_partitions": _NO_STAGE,
    "load_from_fp32_weights": _NO_STAGE,
    "sub_group_size": _STAGE_3,
    "zero_hpz_partition_size": _STAGE_3,
    "memory_efficient_linear": _STAGE_3,
    "override_module_apply": _STAGE_3,
    "log_trace_cache_warnings": _STAGE_3,
    "enable_sanity_checks": _STAGE_3,
} | {name: _STAGE_3 for name in ZeroOptimization.model_fields if name.startswith("stage3_")}

_NVME_KEYS = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)
#: Tensors of a sub-group that DeepSpeed swaps at once: parameter, gradient and AdamW's states.
_SWAP_BUFFERS = 2 + max(len(group.states) for group in ADAMW.groups)
_DYNAMIC_SCALE_KEYS = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


def refusals(keys: DsFile) -> Iterator[str]:
    """Yield a message for each combination of keys that DeepSpeed cannot train as written."""
    yield from _offload_refusals(keys)
    yield from _precision_refusals(keys)
    yield from _gradient_refusals(keys)
    section = keys.activation_checkpointing
    if section and section.partition_activations:
        yield (
            "activation_checkpointing.partition_activations splits activations over model-parallel ranks, "
            "llmscale is data parallel only. Delete it; cpu_checkpointing also saves device memory."
        )
    if section and section.contiguous_memory_optimization:
        yield (
            "activation_checkpointing.contiguous_memory_optimization works only with partition_activations, "
            "which needs model parallelism. Delete it."
        )
    if not keys.zero_allow_untested_optimizer:
        yield (
            "zero_allow_untested_optimizer must be true: DeepSpeed does not list torch's fused AdamW. Delete "
            "the key, llmscale sets it."
        )
    if keys.zero_force_ds_cpu_optimizer:
        yield (
            "zero_force_ds_cpu_optimizer must be false: llmscale passes torch.optim.AdamW. Delete the key, "
            "llmscale sets it."
        )


def _offload_refusals(keys: DsFile) -> Iterator[str]:
    stage, optimizer, parameters = keys.zero.stage, keys.offload_optimizer_device, keys.offload_param_device
    if parameters != "none" and stage < 3:
        yield (
            f"zero_optimization.offload_param needs stage 3; at stage {stage} DeepSpeed ignores it. Set "
            "stage to 3, or delete offload_param."
        )
    if parameters != "none" and keys.zero.zero_hpz_partition_size > 1:
        yield (
            "zero_optimization.zero_hpz_partition_size keeps a second copy of the parameters on the GPUs, and "
            "offload_param takes them away from there. Delete one of them."
        )
    if optimizer != "none" and stage == 0:
        yield (
            "zero_optimization.offload_optimizer needs stage 1, 2 or 3; at stage 0 DeepSpeed ignores it. Set "
            "stage to 1, or delete offload_optimizer."
        )
    if optimizer == "nvme" and stage in (1, 2):
        yield (
            f'zero_optimization.offload_optimizer.device "nvme" needs stage 3; at stage {stage} DeepSpeed '
            'uses the host memory instead. Write "cpu", or set stage to 3.'
        )
    sections: tuple[tuple[str, OffloadOptimizer | OffloadParam | None], ...] = (
        ("offload_optimizer", keys.zero.offload_optimizer),
        ("offload_param", keys.zero.offload_param),
    )
    for name, section in sections:
        if section and section.device == "nvme" and section.nvme_path is None:
            yield (
                f'zero_optimization.{name}.device "nvme" needs nvme_path: a folder on the local NVMe disk '
                "of every host."
            )
    states = keys.zero.offload_optimizer
    if states and states.ratio != 1.0:
        yield (
            f"zero_optimization.offload_optimizer.ratio {states.ratio} needs DeepSpeed's own CPU Adam, "
            "llmscale passes torch.optim.AdamW. Delete it: all states are offloaded."
        )
    if states and states.device == "nvme" and states.buffer_count < _SWAP_BUFFERS:
        yield (
            f"zero_optimization.offload_optimizer.buffer_count {states.buffer_count} is too small: AdamW "
            f"needs {_SWAP_BUFFERS} (parameter, gradient, two moments)."
        )


def _precision_refusals(keys: DsFile) -> Iterator[str]:
    switched_on = [
        name
        for name in ("bf16", "fp16", "torch_autocast")
        if (section := getattr(keys, name)) is not None and section.enabled is True
    ]
    if len(switched_on) > 1:
        yield f"{' and '.join(switched_on)} are both enabled. Keep one precision and delete the other."
    stage, dtype = keys.zero.stage, keys.model_dtype
    if dtype == "fp16" and stage == 0:
        yield (
            "fp16 does not train at stage 0: DeepSpeed divides the gradients by a loss scale that it never "
            "applied to the loss. Set zero_optimization.stage to 1, or use bf16."
        )
    if keys.fp16 and keys.fp16.min_loss_scale > 2**keys.fp16.initial_scale_power:
        yield (
            f"fp16.min_loss_scale {keys.fp16.min_loss_scale} is above the first scale, "
            f"2**initial_scale_power = {2**keys.fp16.initial_scale_power}."
        )
    types = keys.data_types
    if types and types.param_dtype and types.param_dtype != dtype:
        yield (
            f"data_types.param_dtype {types.param_dtype} contradicts the precision {keys.precision}, whose "
            f"parameters are {dtype}. Delete it."
        )
    accumulation = types.grad_accum_dtype if types else None
    legal = {dtype, "fp32"}
    if accumulation and accumulation not in legal:
        yield (
            f"data_types.grad_accum_dtype {accumulation} cannot be used with precision {keys.precision} at "
            f"stage {stage}. Legal: {', '.join(sorted(legal))}."
        )


def _gradient_refusals(keys: DsFile) -> Iterator[str]:
    stage = keys.zero.stage
    if keys.communication_data_type == "fp16" and keys.precision != "fp16":
        yield (
            f"communication_data_type fp16 overflows with precision {keys.precision}, whose loss is not "
            "scaled. Use bf16 or fp32."
        )
    if keys.gradient_allreduce_op == "sum":
        yield (
            'gradient_allreduce_op "sum" makes gradients grow with the number of ranks: the loss curve would '
            'depend on the world size. Delete it ("mean").'
        )
    if stage >= 2 and keys.zero.reduce_scatter and (keys.prescale_gradients or keys.gradient_predivide_factor != 1.0):
        yield (
            f"prescale_gradients and gradient_predivide_factor stop DeepSpeed at stage {stage} with "
            "reduce_scatter. Delete them, or set zero_optimization.reduce_scatter to false."
        )
    if keys.gradient_predivide_factor == 0:
        yield "gradient_predivide_factor must be above 0."
    if stage in (1, 2) and keys.zero.allgather_bucket_size % 2:
        yield (
            f"zero_optimization.allgather_bucket_size {keys.zero.allgather_bucket_size} must be even: "
            "DeepSpeed aligns it to 4 bytes."
        )


def ignored_keys(keys: DsFile) -> Iterator[str]:
    """Yield a message for each written key that has no effect."""
    stage = keys.zero.stage
    for name in sorted(keys.zero.model_fields_set & EFFECTIVE_STAGES.keys()):
        if stage not in EFFECTIVE_STAGES[name]:
            stages = sorted(EFFECTIVE_STAGES[name])
            where = f"only at stage {', '.join(map(str, stages))}" if stages else "nowhere in DeepSpeed 0.19.8"
            yield f"zero_optimization.{name} has no effect at stage {stage} (read {where})."
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(keys.zero, name)
        if section and section.device != "nvme":
            for key in sorted(section.model_fields_set & set(_NVME_KEYS)):
                yield (f'zero_optimization.{name}.{key} has no effect with device "{section.device}" (NVMe only).')
    if keys.aio and "nvme" not in (keys.offload_optimizer_device, keys.offload_param_device):
        yield "aio has no effect without NVMe offload."
    if keys.torch_autocast and keys.torch_autocast.lower_precision_safe_modules is not None:
        yield "torch_autocast.lower_precision_safe_modules has no effect: communication_data_type is for all modules."
    for name in sorted(keys.model_fields_set & {"disable_allgather", "dataloader_drop_last", "vocabulary_size"}):
        yield f"{name} has no effect."
    if keys.fp16 and keys.fp16.loss_scale:
        for name in sorted(keys.fp16.model_fields_set & set(_DYNAMIC_SCALE_KEYS)):
            yield f"fp16.{name} has no effect with a static loss_scale."
    if keys.bf16 and keys.bf16.immediate_grad_update and not _dedicated_bf16_optimizer(keys):
        yield "bf16.immediate_grad_update has no effect except at stage 1 with fp32 gradient accumulation."
    if keys.activation_checkpointing and keys.activation_checkpointing.number_checkpoints:
        yield ("activation_checkpointing.number_checkpoints has no effect without contiguous_memory_optimization.")


def _dedicated_bf16_optimizer(keys: DsFile) -> bool:
    """Return whether DeepSpeed uses its BF16_Optimizer: stage 1, bf16, fp32 accumulation, no offload."""
    accumulation = keys.data_types.grad_accum_dtype if keys.data_types else None
    return keys.zero.stage == 1 and keys.precision == "bf16" and accumulation == "fp32"


#: Keys whose "auto" llmscale.config.deepspeed.resolve fills. For any other key DeepSpeed would take its default.
AUTO_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "torch_autocast.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


def find_problems(config: dict[str, object]) -> list[str]:
    """Return a message for each problem, the worst first; empty if DeepSpeed would train as written."""
    unsupported = list(_unsupported(config))
    try:
        return unsupported + list(refusals(DsFile.model_validate(config)))
    except ValidationError as error:
        wrong = [detail for detail in error.errors() if not _is_unsupported(detail)]
        legal = _without(config, error.errors())
    return unsupported + [_explain(detail) for detail in wrong] + _refusals_of_the_rest(legal)


def _is_unsupported(detail: ErrorDetails) -> bool:
    """Return whether `_unsupported` reports the key."""
    dotted = ".".join(str(part) for part in detail["loc"])
    return any(dotted == name or dotted.startswith(f"{name}.") for name in UNSUPPORTED)


def _without(config: dict[str, object], details: Iterable[ErrorDetails]) -> dict[str, object]:
    rest = copy.deepcopy(config)
    for detail in details:
        section: object = rest
        *parents, key = detail["loc"]
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(key, None)
    return rest


def _refusals_of_the_rest(config: dict[str, object]) -> list[str]:
    """Return the problems between the legal keys; empty if a required key is missing."""
    try:
        return list(refusals(DsFile.model_validate(config)))
    except ValidationError:
        return []


def _unsupported(config: dict[str, object]) -> Iterable[str]:
    for dotted, reason in UNSUPPORTED.items():
        value: object = config
        for name in dotted.split("."):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            yield f"'{dotted}' is not supported: {reason}"


def _explain(detail: ErrorDetails) -> str:
    """Return one of pydantic's errors as a sentence with the path, the value and the legal values."""
    path = tuple(str(part) for part in detail["loc"])
    dotted, value, kind = ".".join(path), detail["input"], detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if value == AUTO:
        return (
            f'{dotted} is "auto", which DeepSpeed would silently replace by its default. Write a value or delete the '
            f"key. llmscale fills: {', '.join(AUTO_KEYS)}."
        )
    if kind == "missing":
        default = "0 (nothing is sharded)" if path[-1] == "stage" else "false"
        return f"{dotted} is missing, DeepSpeed would silently take {default}. Write it."
    return describe_invalid(dotted, detail, show)


def _unknown_key(path: tuple[str, ...]) -> str:
    *parents, key = path
    known = sorted(_section_at(parents).model_fields)
    hint = _home_of(key) or did_you_mean(key, known)
    if not hint:
        place = f"keys of {'.'.join(parents)}" if parents else "top-level keys"
        hint = f" Legal {place}: {', '.join(known)}."
    return f"'{'.'.join(path)}' is not a key that DeepSpeed reads.{hint}"


def _section_at(path: Iterable[str]) -> type[Section]:
    section: type[Section] = DsFile
    for name in path:
        section = _subsections(section)[name]
    return section


def _subsections(section: type[Section]) -> dict[str, type[Section]]:
    found = {}
    for name, field in section.model_fields.items():
        for option in get_args(field.annotation):
            if isinstance(option, type) and issubclass(option, Section):
                found[name] = option
    return found


def _home_of(key: str) -> str:
    """Return the section to which a key belongs, as a sentence; empty if the key is unknown."""
    pending: list[tuple[str, type[Section]]] = [("", DsFile)]
    while pending:
        prefix, section = pending.pop(0)
        if key in section.model_fields:
            return f" It belongs in {prefix.rstrip('.') or 'the top level'}."
        pending += [(f"{prefix}{name}.", sub) for name, sub in _subsections(section).items()]
    return ""
