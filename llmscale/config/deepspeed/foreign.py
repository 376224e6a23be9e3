"""Read the ds_config of another program: "auto", what is off, old names, optimizer and scheduler. No torch.

Hugging Face's Trainer, Megatron-DeepSpeed and DeepSpeed's own examples share one file format with llmscale. Entries in
other words, or for another program, become llmscale's keys here, or are named as without effect.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmscale.config.deepspeed.schema import AUTO, DsFile, Fp16, Section, ZeroOptimization, fills_auto, section_at, show
from llmscale.config.run_config import build_run_config
from llmscale.config.run_flags import flag_words
from llmscale.errors import ConfigError

#: Value of an edit that deletes a key.
DELETED = object()
#: Entries that DeepSpeed reads and that have no effect here, by the reason.
_WITHOUT_EFFECT = {
    "llmscale writes its own checkpoints": """
        checkpoint datastates_ckpt nebula
        zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint
    """,
    "metrics are in the run folder's metrics.jsonl": "comet",
    "llmscale counts micro-batches itself": "managed_gradient_accumulation",
    "llmscale compiles the blocks itself, at every stage (--compile)": "compile",
    "`llmscale estimate` chooses stage, offload and micro-batch": "autotuning",
    "the order of samples is llmscale's own (--seed, --no-shuffle)": "data_efficiency",
    "it generates text during RLHF, llmscale pre-trains": "hybrid_engine",
    "it is for inference": "weight_quantization",
    "llmscale divides sequences itself": "seq_parallel_communication_data_type",
    "llmscale divides experts itself": "use_data_before_expert_parallelism",
    "no gradient of llmscale's models is sparse": "sparse_gradients",
    "DeepSpeed removed it": "graph_harvesting zero_optimization.mics_hierarchical_params_gather",
    "llmscale sets it for its own optimizers": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "DeepSpeed has one stage 1 left": "zero_optimization.legacy_stage1",
    "llmscale clips by and logs the gradient norm": "zero_optimization.compute_grad_norm",
    "--optimizer muon is llmscale's own": "zero_optimization.save_muon_momentum_buffer_in_memory",
    "llmscale's experts are one module": "zero_optimization.leaf_module",
    "pin_memory of offload_optimizer and offload_param is on": "zero_optimization.cpu_offload_use_pin_memory",
    "it belongs to DeepSpeed's own CPU Adam, llmscale passes torch.optim.AdamW": """
        zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc
    """,
    "the GPT has no buffers to keep in another type": "data_types.buffer_dtype",
    "it divides among model-parallel ranks, and llmscale has none": """
        activation_checkpointing.partition_activations activation_checkpointing.contiguous_memory_optimization
    """,
    "it needs contiguous_memory_optimization": "activation_checkpointing.number_checkpoints",
    "communication_data_type is for all modules": "torch_autocast.lower_precision_safe_modules",
    "DeepSpeed 0.19.8 reads it nowhere": """
        zero_optimization.allgather_partitions zero_optimization.load_from_fp32_weights
        disable_allgather dataloader_drop_last vocabulary_size
    """,
}
#: Entries that llmscale cannot train with, by the reason and the fix.
_REFUSED = {
    "llmscale is data parallel only (ZeRO). Delete it and set zero_optimization.stage to 3.": """
        pipeline tensor_parallel
    """,
    "the number of ranks is the launcher's. Delete it and use --nproc-per-node or a hostfile.": "data_parallel_size",
    "llmscale divides experts itself. Delete it and use --num-experts and --expert-parallel-size.": """
        expert_parallel moe
    """,
    "llmscale divides sequences itself. Delete it and use --sequence-parallel-size.": "sequence_parallel_size",
    "DeepSpeed gave up its format. Rename it to zero_optimization.allgather_bucket_size.": "allgather_size",
    "DeepSpeed removed Apex AMP in 2026. Delete it and use 'bf16', 'fp16' or 'torch_autocast'.": "amp",
    "DeepSpeed removed it, and it changes what is trained. Delete it.": """
        compression_training quantize_training eigenvalue progressive_layer_drop
    """,
    "DeepSpeed removed it. Delete it and use --sliding-window N.": "sparse_attention",
    "DeepSpeed removed it. Delete it and use --global-batch-size N: llmscale continues a run on any number of ranks.": (
        "elasticity"
    ),
    "llmscale orders samples itself. Delete it; with --seq-len-ramp-from N --seq-len-ramp-tokens N sequences grow.": """
        curriculum_learning data_efficiency.data_sampling.curriculum_learning
    """,
    "every layer of llmscale's models gets every token. Delete it.": "data_efficiency.data_routing.random_ltd",
    "DeepSpeed removed it. Delete it and use zero_hpz_partition_size, the ranks of a group that keeps a copy of the "
    "parameters.": "zero_optimization.mics_shard_size",
    "ranks then exchange rounded numbers, which changes the loss curve. Delete it.": """
        zero_optimization.zeropp_loco_param zero_optimization.zero_quantized_weights
        zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_gradients
    """,
    "it belongs to DeepSpeed's own CPU Adam, llmscale passes torch.optim.AdamW. Delete it.": """
        zero_optimization.zenflow fp16.fp16_master_weights_and_grads
    """,
    "llmscale keeps an fp32 master copy of every weight. Delete it.": "data_types.keep_in_fp32_modules",
}
#: Values of entries that are llmscale's own behaviour, where that is not "off".
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "zero_allow_untested_optimizer": (True,),
    "zero_optimization.compute_grad_norm": (True,),
    "sequence_parallel_size": (1,),
    "zero_optimization.mics_shard_size": (-1, 0, 1),
}
#: Sections that do nothing unless they have "enabled".
_SWITCHED = """
    nebula comet autotuning hybrid_engine amp quantize_training eigenvalue progressive_layer_drop elasticity
    curriculum_learning data_efficiency data_efficiency.data_sampling.curriculum_learning
    data_efficiency.data_routing.random_ltd
"""
_ZERO = "zero_optimization"
#: First keys for offload to host memory, which are switches, with the sections that took their place.
_CPU_OFFLOAD = {
    f"{_ZERO}.cpu_offload": f"{_ZERO}.offload_optimizer",
    f"{_ZERO}.cpu_offload_param": f"{_ZERO}.offload_param",
}
#: Names that DeepSpeed reads, too, with the usual ones. Its stage-3 keys have one without `stage3_` each.
_OTHER_NAMES = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    **{
        f"{_ZERO}.{name.removeprefix('stage3_')}": f"{_ZERO}.{name}"
        for name in ZeroOptimization.model_fields
        if name.startswith("stage3_")
    },
    **_CPU_OFFLOAD,
}
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_SWITCH = (True, False)
#: Weight decay of torch.optim.AdamW, which DeepSpeed builds where a block says `torch_adam`.
TORCH_WEIGHT_DECAY = 1e-2
_WARMUP = {"warmup_num_steps": "warmup_steps", "warmup_type": "warmup_type"}
_FROM_RATE = {**_WARMUP, "warmup_min_lr": "warmup_min_lr", "warmup_max_lr": "lr"}
_WARMUP_DEFAULTS = {"warmup_num_steps": 1000, "warmup_type": "log"}
#: Types that "auto" stands for: those of Hugging Face's Trainer.
_AUTO_TYPES = {"scheduler": "warmuplr", "optimizer": "adamw"}
#: Flags in place of a block of another type.
_FLAGS = {
    "scheduler": "--schedule cosine, linear, constant or wsd, --lr N and --warmup-steps N",
    "optimizer": "--optimizer adamw, with --lr N where llmscale's own default is not meant, or --optimizer muon",
}


class Change(NamedTuple):
    """A problem of a file, or the way in which an entry is read, and the edits for it."""

    text: str
    edits: Mapping[str, object]
    """Values by dotted path; DELETED removes a key."""


def delete(path: str, text: str) -> Change:
    """Return a change that deletes a key."""
    return Change(text, {path: DELETED})


@dataclass
class Reading:
    """A ds_config in llmscale's keys."""

    config: dict[str, object]
    """The file after all edits but those of `problems`; its keys may still be unknown."""
    run_keys: dict[str, object] = field(default_factory=dict)
    """Keys of a run that the file sets."""
    scheduler_defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys of a run that the scheduler's block leaves to DeepSpeed's defaults; they come before the optimizer's."""
    problems: list[Change] = field(default_factory=list)
    """Entries that llmscale cannot train with."""
    notices: list[Change] = field(default_factory=list)
    """Entries that are read in another way than written, or have no effect."""
    silent: list[Change] = field(default_factory=list)
    """Entries that mean what llmscale does without them: off, "auto", or another name of a key."""

    def value_at(self, path: str) -> object:
        """Return the value at a dotted path, or None."""
        value: object = self.config
        for name in path.split("."):
            if isinstance(value, Mapping):
                value = value.get(name)
            else:
                value = None
        return value

    def change(self, changes: list[Change], text: str, edits: Mapping[str, object]) -> None:
        """Edit the file, and note why."""
        apply_edits(self.config, edits)
        changes.append(Change(text, edits))

    def drop(self, changes: list[Change], path: str, text: str) -> None:
        """Delete an entry, and note why."""
        self.change(changes, text, {path: DELETED})


class Entry(NamedTuple):
    """Treatment of an entry that llmscale does not train with."""

    reason: str
    """Reason why it has no effect; for a refused one the reason and the fix."""
    is_refused: bool


#: Entries that DeepSpeed reads and llmscale does not train with, those within a section before the section.
ENTRIES: Mapping[str, Entry] = {
    path: Entry(reason, is_refused)
    for table, is_refused in ((_REFUSED, True), (_WITHOUT_EFFECT, False))
    for reason, paths in table.items()
    for path in paths.split()
}
#: Entries of public files that DeepSpeed does not read either.
_READ_BY_NOBODY: Mapping[str, Entry] = {
    "fp16.opt_level": Entry("it is Apex's", False),
    "fp16.fp16": Entry("it is GPT-NeoX's; fp16.enabled decides", False),
    "bf16.bf16": Entry("it is GPT-NeoX's; bf16.enabled decides", False),
} | {
    f"bf16.{name}": Entry("bf16 needs no loss scale", False)
    for name in Fp16.model_fields
    if "scale" in name or "hysteresis" in name
}


def read_foreign(config: Mapping[str, object]) -> Reading:
    """Return a ds_config in llmscale's keys; `config` stays as it is."""
    reading = Reading(copy.deepcopy(dict(config)))
    for path in _paths(config):
        if path.rpartition(".")[2].startswith(("_", "//", "#")):
            reading.drop(reading.silent, path, "a comment")
    _rename(reading)
    for path in _SWITCHED.split():
        section = reading.value_at(path)
        if isinstance(section, Mapping) and is_off(section.get("enabled")):
            reading.drop(reading.silent, path, f"{path} is off")
    attention = reading.config.get("sparse_attention")
    if isinstance(attention, Mapping) and attention.get("mode") in (None, "dense"):
        reading.drop(reading.silent, "sparse_attention", "sparse_attention is dense")
    for path, entry in {**ENTRIES, **_READ_BY_NOBODY}.items():
        if path in _paths(reading.config):
            _read_entry(reading, path, entry)
    _read_wandb(reading)
    for name in BLOCKS:
        if name in reading.config:
            _read_block(reading, name)
    _read_stage(reading)
    _drop_off_and_auto(reading, "", DsFile)
    return reading


def apply_edits(config: dict[str, object], edits: Mapping[str, object]) -> None:
    """Write values at dotted paths, in sections that are made where they are missing."""
    for path, value in edits.items():
        section = config
        key = path
        # A key may itself contain dots.
        while key not in section and "." in key:
            name, _, key = key.partition(".")
            inner = section.get(name)
            if not isinstance(inner, dict):
                inner = {}
                if value is not DELETED:
                    section[name] = inner
            section = inner
        if value is DELETED:
            section.pop(key, None)
        else:
            section[key] = value


def _paths(section: Mapping[str, object], prefix: str = "") -> set[str]:
    """Return the dotted paths of all entries."""
    paths = set()
    for name, value in section.items():
        paths.add(f"{prefix}{name}")
        if isinstance(value, dict):
            paths |= _paths(value, f"{prefix}{name}.")
    return paths


def is_off(value: object) -> bool:
    """Return whether an entry says nothing: false, "auto", empty, or a section that is not enabled."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return is_off(value["enabled"])
        switched = [inner for inner in value.values() if isinstance(inner, Mapping) and "enabled" in inner]
        return all(map(is_off, switched or value.values()))
    return value in (None, False, AUTO, [], "none")


def _read_entry(reading: Reading, path: str, entry: Entry) -> None:
    """Drop an entry that is off or without effect; another one is a problem."""
    value = reading.value_at(path)
    if value in NEUTRAL_VALUES[path] if path in NEUTRAL_VALUES else is_off(value):
        reading.drop(reading.silent, path, f"{path} is off")
    elif entry.is_refused:
        reading.drop(reading.problems, path, f"'{path}' is not supported: {entry.reason}")
    else:
        reading.drop(reading.notices, path, f"{path} has no effect: {entry.reason}.")


def _rename(reading: Reading) -> None:
    """Give entries and types with an old name, or with a second one that DeepSpeed also reads, their usual name."""
    switch = reading.config.get(_ZERO)
    bucket_size = reading.config.get("allgather_size")
    if isinstance(switch, bool):
        # DeepSpeed's first format: a switch, with the size of its bucket outside.
        edits: dict[str, object] = {_ZERO: {"stage": int(switch)}}
        if bucket_size is not None:
            edits |= {f"{_ZERO}.allgather_bucket_size": bucket_size, "allgather_size": DELETED}
        reading.change(reading.silent, f"{_ZERO} is read as stage {int(switch)}", edits)
    for old, new in _OTHER_NAMES.items():
        if old not in (paths := _paths(reading.config)):
            continue
        value: Any = reading.value_at(old)
        if old in _CPU_OFFLOAD:
            value = {"device": "cpu" if value is True else "none"}
            if reading.value_at(f"{_ZERO}.cpu_offload_use_pin_memory") is False:
                value["pin_memory"] = False
        edits = {old: DELETED} if new in paths else {old: DELETED, new: value}
        reading.change(reading.silent, f"{old} is read as {new}", edits)
    for path in ("data_types.grad_accum_dtype", "data_types.param_dtype"):
        if dtype := _DTYPES.get(str(reading.value_at(path)).removeprefix("torch.")):
            reading.change(reading.silent, f"{path} is read as {dtype}", {path: dtype})


def _read_stage(reading: Reading) -> None:
    """Read stage "auto" as Accelerate does, stage 0 in fp16 as stage 1, and sub-groups of 0 as DeepSpeed does."""
    zero = reading.config.get(_ZERO, {"stage": 0})
    if not isinstance(zero, dict):
        return
    stage = f"{_ZERO}.stage"
    sub_group = f"{_ZERO}.sub_group_size"
    if zero.get("stage") == AUTO:
        text = f'{stage} "auto" is read as 2, Accelerate\'s default.'
        reading.change(reading.notices, text, {stage: 2})
    switches = {name: reading.value_at(f"{name}.enabled") for name in ("bf16", "fp16", "torch_autocast")}
    precision = next((name for wanted in (True, AUTO) for name, on in switches.items() if on == wanted), None)
    if precision == "fp16" and zero.get("stage") == 0:
        text = (
            f"{stage} 0 is read as 1, which trains the same: at stage 0 in fp16 DeepSpeed divides the gradients by a "
            "loss scale that it never applied to the loss."
        )
        reading.change(reading.notices, text, {stage: 1})
    if zero.get("sub_group_size") == 0:
        text = f"{sub_group} 0 is read as 1: a sub-group for each parameter, as in DeepSpeed"
        reading.change(reading.silent, text, {sub_group: 1})


def _drop_off_and_auto(reading: Reading, prefix: str, kind: type[Section]) -> None:
    """Drop "auto" where a key's default is meant, and unknown keys of known sections that are off."""
    if prefix:
        section = reading.value_at(prefix.rstrip("."))
    else:
        section = reading.config
    if not isinstance(section, dict):
        return
    for name, value in list(section.items()):
        path = f"{prefix}{name}"
        inner = section_at(kind, name)
        if value == AUTO and name in kind.model_fields and not fills_auto(kind, name):
            reading.drop(reading.silent, path, f'{path} "auto" is llmscale\'s default')
        elif name not in kind.model_fields and isinstance(value, dict) and "enabled" in value and is_off(value):
            reading.drop(reading.silent, path, f"{path} is off")
        elif inner is not None and isinstance(value, dict):
            if "enabled" in value and value["enabled"] != AUTO and is_off(value["enabled"]):
                for unknown in value.keys() - inner.model_fields.keys():
                    reading.drop(reading.silent, f"{path}.{unknown}", f"{path} is off")
            _drop_off_and_auto(reading, f"{path}.", inner)


class Block(NamedTuple):
    """One type of optimizer or scheduler of DeepSpeed, as keys of a run."""

    keys: Mapping[str, object]
    """Keys that the type itself sets."""
    names: Mapping[str, str]
    """Keys that its parameters are."""
    defaults: Mapping[str, object]
    """DeepSpeed's values of parameters that a block leaves out."""
    neutral: Mapping[str, tuple[object, ...]] = {}
    """Parameters that change nothing, at these values."""
    unread: tuple[str, ...] = ()
    """Parameters without effect at any value."""
    required: tuple[str, ...] = ()
    """Parameters that DeepSpeed has no default for."""


_ADAM = Block(
    {"optimizer": "adamw"},
    {name: name for name in ("lr", "beta1", "beta2", "eps", "weight_decay")} | {"max_grad_norm": "gradient_clipping"},
    # Of DeepSpeed's FusedAdam and DeepSpeedCPUAdam, which it builds for Adam and AdamW alike.
    {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    neutral={
        "torch_adam": _SWITCH,
        "fused": _SWITCH,
        "foreach": _SWITCH,
        "set_grad_none": _SWITCH,
        "fp32_optimizer_states": (True,),
        "adam_w_mode": (True,),
        "bias_correction": (True,),
        "amsgrad": (False,),
        "maximize": (False,),
    },
)
#: Blocks of a ds_config, each with its types in lower case. DeepSpeed's scheduler sets the rate of its optimizer.
BLOCKS: Mapping[str, Mapping[str, Block]] = {
    "scheduler": {
        "warmuplr": Block(
            {"schedule": "WarmupLR"},
            _FROM_RATE,
            # Without warmup_max_lr the peak is the optimizer's rate.
            {"warmup_min_lr": 0.0, **_WARMUP_DEFAULTS},
            unread=("last_batch_iteration", "warmup_min_ratio"),
        ),
        "warmupdecaylr": Block(
            {"schedule": "WarmupDecayLR"},
            {**_FROM_RATE, "total_num_steps": "decay_steps"},
            {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, **_WARMUP_DEFAULTS},
            unread=("last_batch_iteration", "warmup_min_ratio"),
            required=("total_num_steps",),
        ),
        "warmupcosinelr": Block(
            {"schedule": "WarmupCosineLR"},
            {
                **_WARMUP,
                "warmup_min_ratio": "warmup_min_ratio",
                "cos_min_ratio": "min_lr_frac",
                "total_num_steps": "decay_steps",
                # DeepSpeed takes the peak from the optimizer; older versions took it from here.
                "warmup_max_lr": "lr",
            },
            {"warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4, **_WARMUP_DEFAULTS},
            unread=("last_batch_iteration", "warmup_min_lr"),
            required=("total_num_steps",),
        ),
    },
    "optimizer": dict.fromkeys(("adamw", "adam", "fusedadam", "deepspeedcpuadam", "cpuadam", "torchadam"), _ADAM),
}


def _read_block(reading: Reading, name: str) -> None:
    """Read an optimizer or scheduler block as flags would be read."""
    block: Any = reading.config[name]
    if is_off(block):
        reading.drop(reading.silent, name, f"{name} is llmscale's own")
        return
    if isinstance(block, dict):
        kind = block.get("type")
    else:
        kind = None
    if isinstance(block, dict):
        params = block.get("params", {})
    else:
        params = None
    if not isinstance(kind, str) or not isinstance(params, dict):
        text = (
            f'{name} = {show(block)}: must be an object {{"type": ..., "params": {{...}}}}. Write it so, or delete it.'
        )
        reading.drop(reading.problems, name, text)
        return
    if (known := BLOCKS[name].get(_AUTO_TYPES[name] if kind == AUTO else kind.lower())) is None:
        legal = ", ".join(BLOCKS[name])
        text = f"{name}.type {show(kind)} is not one of {legal}. Delete '{name}' and give {_FLAGS[name]}."
        reading.drop(reading.problems, name, text)
        return
    for key in block.keys() - {"type", "params", "legacy_fusion"}:
        text = f"'{name}.{key}' is not a key that DeepSpeed reads. Delete it."
        reading.problems.append(delete(f"{name}.{key}", text))
    _read_params(reading, name, known, params)


def _read_params(reading: Reading, name: str, known: Block, params: Mapping[str, object]) -> None:
    """Read the parameters of a block of a known type; what it leaves out has DeepSpeed's default."""
    keys = dict(known.keys)
    given = _without_auto(params)
    if not given.get("weight_decay"):
        # Adam and AdamW are then the same.
        given.pop("adam_w_mode", None)
    without_effect = [param for param in given if param in known.unread]
    for param, value in given.items():
        path = f"{name}.params.{param}"
        if param in ("beta1", "beta2") and param in params:
            betas = [params.get("beta1", 0.9), params.get("beta2", 0.999)]
            edits = {f"{name}.params.betas": betas, f"{name}.params.beta1": DELETED, f"{name}.params.beta2": DELETED}
            text = f"'{path}' is not a key that DeepSpeed reads. Write both as betas, such as {betas}."
            reading.problems.append(Change(text, edits))
        elif param in known.names:
            # The file's own gradient_clipping comes before an optimizer's max_grad_norm, as in DeepSpeed.
            if reading.config.get(known.names[param]) in (None, AUTO):
                keys[known.names[param]] = value
        elif param not in known.unread and value not in known.neutral.get(param, ()):
            words = ("betas" if word in ("beta1", "beta2") else word for word in (*known.names, *known.unread))
            legal = ", ".join(dict.fromkeys(words))
            reading.problems.append(delete(path, f"{path} = {show(value)} is not among {legal}. Delete it."))
    left_out = _defaults(known, params)
    more = ""
    if left_out:
        listed = ", ".join(f"{param} {show(value)}" for param, value in left_out.items())
        more += f" What it leaves out has DeepSpeed's default: {listed}."
    if missing := [param for param in known.required if param not in params]:
        more += f" {', '.join(missing)}, for which DeepSpeed has no default, is the steps of the run."
    if without_effect:
        more += f" {', '.join(without_effect)}: without effect."
    defaults = {known.names[param]: value for param, value in _without_auto(left_out).items()}
    if name == "scheduler":
        reading.scheduler_defaults = defaults
    _take(reading, name, keys, more, defaults)


def _defaults(known: Block, params: Mapping[str, object]) -> dict[str, object]:
    """Return DeepSpeed's values of the parameters that are not written, not even as "auto"."""
    written = {*params, *(("betas",) if {"beta1", "beta2"} & params.keys() else ())}
    defaults = {param: value for param, value in known.defaults.items() if param not in written}
    if "weight_decay" in defaults and params.get("torch_adam") is True and params.get("adam_w_mode", True):
        defaults["weight_decay"] = TORCH_WEIGHT_DECAY
    return defaults


def _without_auto(params: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters that have values, both `betas` by their own names."""
    params, betas = dict(params), params.get("betas")
    if isinstance(betas, list) and len(betas) == 2:
        del params["betas"]
        params |= {"beta1": betas[0], "beta2": betas[1]}
    return {key: value for key, value in params.items() if value not in (AUTO, None)}


def _read_wandb(reading: Reading) -> None:
    """Read DeepSpeed's own logging to Weights & Biases as llmscale's."""
    section = reading.config.get("wandb")
    if not isinstance(section, dict) or is_off(section.get("enabled")):
        if "wandb" in reading.config:
            reading.drop(reading.silent, "wandb", "wandb is off")
        return
    keys: dict[str, object] = {"wandb": True}
    if section.get("project"):
        keys["wandb_project"] = section["project"]
    rest = sorted(section.keys() - {"enabled", "project"})
    if rest:
        more = f" {', '.join(rest)}: set WANDB_ENTITY and WANDB_RUN_GROUP instead."
    else:
        more = ""
    _take(reading, "wandb", keys, more)


def _take(
    reading: Reading, path: str, keys: Mapping[str, object], more: str, defaults: Mapping[str, object] | None = None
) -> None:
    """Take an entry as keys of a run, with `defaults` that it leaves open. An illegal value is a problem."""
    del reading.config[path]
    try:
        build_run_config(dict(keys))
    except ConfigError as error:
        flags = " and ".join(f"--{key.replace('_', '-')}" for key in keys)
        text = f"{path} sets a key of the run wrongly: {error} Delete it and give {flags}."
        reading.problems.append(delete(path, text))
        return
    # Another schedule of a flag takes what the block says, and not its defaults.
    own = keys if defaults is None or path == "scheduler" else {**keys, **defaults}
    reading.run_keys = {**own, **reading.run_keys}
    text = f"{path} is taken as {_flags({**keys, **(defaults or {})})}; a flag or the run file overrides it.{more}"
    reading.notices.append(Change(text, {}))


def _flags(keys: Mapping[str, object]) -> str:
    return " ".join(word for key, value in keys.items() for word in flag_words(key, value))
