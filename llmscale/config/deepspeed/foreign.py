"""Read the ds_config of another program: "auto", what is off, old names, optimizer and scheduler. No torch.

Hugging Face's Trainer, Megatron-DeepSpeed and DeepSpeed's own examples share one file format with llmscale. Entries in
other words, or for another program, become llmscale's keys here, or are named as without effect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from llmscale.config.deepspeed.schema import AUTO, DsFile, Fp16, Section, ZeroOptimization, fills_auto, section_at, show
from llmscale.config.run_config import build_run_config
from llmscale.errors import ConfigError

#: Value of an edit that deletes a key.
DELETED = object()


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
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def change(self, changes: list[Change], text: str, edits: Mapping[str, object]) -> None:
        """Edit the file, and note why."""
        apply_edits(self.config, edits)
        changes.append(Change(text, edits))

    def drop(self, changes: list[Change], path: str, text: str) -> None:
        """Delete an entry, and note why."""
        self.change(changes, text, {path: DELETED})

    def drop_off(self, path: str) -> None:
        """Delete an entry that is off, if there is one."""
        if path in _paths(self.config):
            self.drop(self.silent, path, f"{path} is off")


class Entry(NamedTuple):
    """Treatment of an entry that llmscale does not train with."""

    reason: str
    """Reason why it has no effect; for a refused one the reason and the fix."""
    is_refused: bool = False
    switch: str = ""
    """Name of the entry without which the section does nothing."""
    neutral: tuple[object, ...] = ()
    """Values that are llmscale's own behaviour, where that is not "off"."""

    def is_nothing(self, value: object) -> bool:
        """Return whether the entry says nothing with this value."""
        if self.neutral:
            return value in self.neutral
        return is_off(value.get(self.switch) if self.switch and isinstance(value, Mapping) else value)


def _refused(reason: str, *, switch: str = "", neutral: tuple[object, ...] = ()) -> Entry:
    return Entry(reason, True, switch, neutral)


_LOOP = "llmscale counts micro-batches itself"
_CPU_ADAM = "it belongs to DeepSpeed's own CPU Adam, llmscale passes torch.optim.AdamW"
_OWN_CHECKPOINTS = "llmscale writes its own checkpoints"
_NO_MODEL_PARALLEL = "it divides among model-parallel ranks, and llmscale has none"
_SET_BY_LLMSCALE = "llmscale sets it for its own optimizers"
_QUANTISED = "ranks then exchange rounded numbers, which changes the loss curve. Delete it."
_CHANGES_MODEL = "DeepSpeed removed it, and it changes what is trained. Delete it."

#: Entries that DeepSpeed reads and llmscale does not train with.
ENTRIES: Mapping[str, Entry] = {
    "checkpoint": Entry(_OWN_CHECKPOINTS),
    "datastates_ckpt": Entry(_OWN_CHECKPOINTS),
    "nebula": Entry(_OWN_CHECKPOINTS, switch="enabled"),
    "comet": Entry("metrics are in the run folder's metrics.jsonl", switch="enabled"),
    "managed_gradient_accumulation": Entry(_LOOP),
    "compile": Entry("llmscale compiles the blocks itself, at every stage (--compile)"),
    "autotuning": Entry("`llmscale estimate` chooses stage, offload and micro-batch", switch="enabled"),
    "data_efficiency": Entry("the order of samples is llmscale's own (--seed, --no-shuffle)", switch="enabled"),
    "hybrid_engine": Entry("it generates text during RLHF, llmscale pre-trains", switch="enabled"),
    "weight_quantization": Entry("it is for inference"),
    "seq_parallel_communication_data_type": Entry("llmscale divides sequences itself"),
    "use_data_before_expert_parallelism": Entry("llmscale divides experts itself"),
    "sparse_gradients": Entry("no gradient of llmscale's models is sparse"),
    "graph_harvesting": Entry("DeepSpeed removed it"),
    "zero_allow_untested_optimizer": Entry(_SET_BY_LLMSCALE, neutral=(True,)),
    "zero_force_ds_cpu_optimizer": Entry(_SET_BY_LLMSCALE),
    "zero_optimization.legacy_stage1": Entry("DeepSpeed has one stage 1 left"),
    "zero_optimization.elastic_checkpoint": Entry(_OWN_CHECKPOINTS),
    "zero_optimization.pipeline_loading_checkpoint": Entry(_OWN_CHECKPOINTS),
    "zero_optimization.compute_grad_norm": Entry("llmscale clips by and logs the gradient norm", neutral=(True,)),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Entry("--optimizer muon is llmscale's own"),
    "zero_optimization.leaf_module": Entry("llmscale's experts are one module"),
    "zero_optimization.mics_hierarchical_params_gather": Entry("DeepSpeed removed it"),
    "zero_optimization.offload_optimizer.super_offload": Entry(_CPU_ADAM),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Entry(_CPU_ADAM),
    "data_types.buffer_dtype": Entry("the GPT has no buffers to keep in another type"),
    "activation_checkpointing.partition_activations": Entry(_NO_MODEL_PARALLEL),
    "activation_checkpointing.contiguous_memory_optimization": Entry(_NO_MODEL_PARALLEL),
    "pipeline": _refused("llmscale is data parallel only (ZeRO). Delete it."),
    "tensor_parallel": _refused(
        "llmscale is data parallel only (ZeRO). Delete it and set zero_optimization.stage to 3."
    ),
    "data_parallel_size": _refused(
        "the number of ranks is the launcher's. Delete it and use --nproc-per-node or a hostfile."
    ),
    "expert_parallel": _refused("llmscale divides experts itself. Delete it and use --expert-parallel-size."),
    "sequence_parallel_size": _refused(
        "llmscale divides sequences itself. Delete it and use --sequence-parallel-size.", neutral=(1,)
    ),
    "allgather_size": _refused("DeepSpeed gave up its format. Rename it to zero_optimization.allgather_bucket_size."),
    "moe": _refused("a ds_config has no experts. Delete it and use --num-experts and --expert-parallel-size."),
    "amp": _refused(
        "DeepSpeed removed Apex AMP in 2026. Delete it and use 'bf16', 'fp16' or 'torch_autocast'.", switch="enabled"
    ),
    "compression_training": _refused(_CHANGES_MODEL),
    "quantize_training": _refused(_CHANGES_MODEL, switch="enabled"),
    "eigenvalue": _refused(_CHANGES_MODEL, switch="enabled"),
    "progressive_layer_drop": _refused(_CHANGES_MODEL, switch="enabled"),
    "sparse_attention": _refused("DeepSpeed removed it. Delete it and use --sliding-window N.", switch="mode"),
    "elasticity": _refused(
        "DeepSpeed removed it. Delete it and use --global-batch-size N: llmscale continues a run on any "
        "number of ranks.",
        switch="enabled",
    ),
    "zero_optimization.mics_shard_size": _refused(
        "DeepSpeed removed it. Delete it and use zero_hpz_partition_size, the "
        "ranks of a group that keeps a copy of the parameters.",
        neutral=(-1, 0, 1),
    ),
    "zero_optimization.zeropp_loco_param": _refused(_QUANTISED),
    "zero_optimization.zenflow": _refused(f"{_CPU_ADAM}. Delete it."),
    "zero_optimization.zero_quantized_weights": _refused(_QUANTISED),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(_QUANTISED),
    "zero_optimization.zero_quantized_gradients": _refused(_QUANTISED),
    "fp16.fp16_master_weights_and_grads": _refused(f"{_CPU_ADAM}. Delete it."),
    "data_types.keep_in_fp32_modules": _refused("llmscale keeps an fp32 master copy of every weight. Delete it."),
}

#: Entries of public files that DeepSpeed does not read either, each with the reason.
_READ_BY_NOBODY: Mapping[str, Entry] = {
    "fp16.opt_level": Entry("it is Apex's"),
    "fp16.fp16": Entry("it is GPT-NeoX's; fp16.enabled decides"),
    "bf16.bf16": Entry("it is GPT-NeoX's; bf16.enabled decides"),
} | {
    f"bf16.{name}": Entry("bf16 needs no loss scale")
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
    _read_wandb(reading)
    _read_curricula(reading)
    for path, entry in {**ENTRIES, **_READ_BY_NOBODY}.items():
        if path in _paths(reading.config):
            _read_entry(reading, path, entry)
    _read_scheduler(reading)
    _read_optimizer(reading)
    _read_stage(reading)
    _drop_off_and_auto(reading, "", DsFile)
    return reading


def apply_edits(config: dict[str, object], edits: Mapping[str, object]) -> None:
    """Write values at dotted paths, in sections that are made where they are missing."""
    for path, value in edits.items():
        section, key = config, path
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
    return value in (None, False, AUTO, [], "none", "dense")


def _read_entry(reading: Reading, path: str, entry: Entry) -> None:
    """Drop an entry that is off or without effect; another one is a problem."""
    if entry.is_nothing(reading.value_at(path)):
        reading.drop_off(path)
    elif entry.is_refused:
        reading.drop(reading.problems, path, f"'{path}' is not supported: {entry.reason}")
    else:
        reading.drop(reading.notices, path, f"{path} has no effect: {entry.reason}.")


def _rename(reading: Reading) -> None:
    """Give entries with an old name, or with a second one that DeepSpeed also reads, their usual name."""
    config = reading.config
    if isinstance(zero := config.get("zero_optimization"), bool):
        edits: dict[str, object] = {"zero_optimization": {"stage": int(zero)}}
        if "allgather_size" in config:
            edits |= {"allgather_size": DELETED, "zero_optimization.allgather_bucket_size": config["allgather_size"]}
        text = f"zero_optimization {show(zero)} is read as stage {int(zero)}"
        reading.change(reading.silent, text, edits)
    names = {"bfloat16": "bf16", "aio.thread_count": "aio.intra_op_parallelism"}
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        for name in zero:
            usual = f"stage3_{name.removeprefix('stage3_').replace('_fp16_', '_16bit_')}"
            if name not in ZeroOptimization.model_fields and usual in ZeroOptimization.model_fields:
                names[f"zero_optimization.{name}"] = f"zero_optimization.{usual}"
        _read_cpu_offload(reading, zero)
    paths = _paths(config)
    for old, new in names.items():
        if old in paths:
            edits = {old: DELETED} if new in paths else {old: DELETED, new: reading.value_at(old)}
            reading.change(reading.silent, f"{old} is read as {new}", edits)
    for path in ("data_types.grad_accum_dtype", "data_types.param_dtype"):
        if dtype := {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}.get(
            str(reading.value_at(path)).removeprefix("torch.")
        ):
            reading.change(reading.silent, f"{path} is read as {dtype}", {path: dtype})


def _read_stage(reading: Reading) -> None:
    """Read stage "auto" as Accelerate does, stage 0 in fp16 as stage 1, and sub-groups of 0 as DeepSpeed does."""
    zero = reading.config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return
    stage, sub_group = "zero_optimization.stage", "zero_optimization.sub_group_size"
    if zero.get("stage") == AUTO:
        text = f'{stage} "auto" is read as 2, Accelerate\'s default.'
        reading.change(reading.notices, text, {stage: 2})
    switches = {name: reading.value_at(f"{name}.enabled") for name in ("bf16", "fp16", "torch_autocast")}
    precision = next((name for wanted in (True, AUTO) for name, on in switches.items() if on == wanted), None)
    if precision == "fp16" and ("zero_optimization" not in reading.config or zero.get("stage") == 0):
        text = (
            f"{stage} 0 is read as 1, which trains the same: at stage 0 in fp16 DeepSpeed divides the gradients by a "
            "loss scale that it never applied to the loss."
        )
        reading.change(reading.notices, text, {stage: 1})
    if zero.get("sub_group_size") == 0:
        text = f"{sub_group} 0 is read as 1: a sub-group for each parameter, as in DeepSpeed"
        reading.change(reading.silent, text, {sub_group: 1})


def _read_cpu_offload(reading: Reading, zero: dict[str, object]) -> None:
    """Read DeepSpeed's first keys for offload to host memory."""
    pinned = zero.get("cpu_offload_use_pin_memory")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero:
            continue
        path = f"zero_optimization.{old}"
        edits: dict[str, object] = {path: DELETED}
        if zero[old] is True and new not in zero:
            section = {"device": "cpu"} | ({"pin_memory": pinned} if isinstance(pinned, bool) else {})
            edits[f"zero_optimization.{new}"] = section
        text = f'{path} {show(zero[old])} is read as {new} to "{"cpu" if zero[old] is True else "none"}"'
        reading.change(reading.silent, text, edits)
    if "cpu_offload_use_pin_memory" in zero:
        path = "zero_optimization.cpu_offload_use_pin_memory"
        reading.drop(reading.silent, path, f"{path} is read as pin_memory")


def _is_disabled(section: object) -> bool:
    return is_off(section.get("enabled") if isinstance(section, Mapping) else section)


def _read_wandb(reading: Reading) -> None:
    """Read DeepSpeed's own logging to Weights & Biases as llmscale's."""
    section = reading.config.get("wandb")
    if not isinstance(section, dict) or _is_disabled(section):
        reading.drop_off("wandb")
        return
    keys: dict[str, object] = {"wandb": True}
    if isinstance(project := section.get("project"), str) and project:
        keys["wandb_project"] = project
    rest = sorted(section.keys() - {"enabled", "project"})
    variables = f" {', '.join(rest)}: set WANDB_ENTITY and WANDB_RUN_GROUP instead." if rest else ""
    _take(reading, "wandb", keys, variables)


def _read_curricula(reading: Reading) -> None:
    """Refuse a curriculum over the lengths of sequences, in either of DeepSpeed's places, and random-LTD."""
    for section in ("curriculum_learning", "data_efficiency"):
        if _is_disabled(reading.config.get(section)):
            reading.drop_off(section)
    _refuse_curriculum(reading, "curriculum_learning")
    _refuse_curriculum(reading, "data_efficiency.data_sampling.curriculum_learning")
    routing = "data_efficiency.data_routing.random_ltd"
    if _is_on(reading.value_at(routing)):
        text = f"'{routing}' is not supported: every layer of llmscale's models gets every token. Delete it."
        reading.drop(reading.problems, routing, text)


def _is_on(section: object) -> bool:
    return isinstance(section, Mapping) and not is_off(section.get("enabled"))


def _refuse_curriculum(reading: Reading, path: str) -> None:
    curriculum = reading.value_at(path)
    if isinstance(curriculum, Mapping) and _is_on(curriculum):
        flags = _describe_ramp(curriculum)
        text = f"'{path}' is not supported: llmscale orders samples itself. Delete it{flags}."
        reading.drop(reading.problems, path, text)


def _describe_ramp(curriculum: Mapping[str, object]) -> str:
    """Return the flags that make sequences grow as a curriculum over their lengths does."""
    texts = [inner for inner in _leaves(curriculum) if inner[0] in ("min_difficulty", "total_curriculum_step")]
    values = dict(reversed(texts))
    steps = values.get("total_curriculum_step")
    of_steps = f", the tokens of its {steps} steps" if steps else ""
    return (
        f" and give --seq-len-ramp-from {values.get('min_difficulty', 'N')} --seq-len-ramp-tokens N{of_steps}: "
        "sequences then double in length"
    )


def _leaves(section: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield name, value


def _drop_off_and_auto(reading: Reading, prefix: str, kind: type[Section]) -> None:
    """Drop "auto" where a key's default is meant, and unknown keys of known sections that are off."""
    section = reading.value_at(prefix.rstrip(".")) if prefix else reading.config
    if not isinstance(section, dict):
        return
    for name, value in list(section.items()):
        path, inner = f"{prefix}{name}", section_at(kind, name)
        if value == AUTO and name in kind.model_fields and not fills_auto(kind, name):
            reading.drop(reading.silent, path, f'{path} "auto" is llmscale\'s default')
        elif name not in kind.model_fields and isinstance(value, dict) and "enabled" in value and is_off(value):
            reading.drop(reading.silent, path, f"{path} is off")
        elif inner is not None and isinstance(value, dict):
            if "enabled" in value and value["enabled"] != AUTO and is_off(value["enabled"]):
                for unknown in value.keys() - inner.model_fields.keys():
                    reading.drop(reading.silent, f"{path}.{unknown}", f"{path} is off")
            _drop_off_and_auto(reading, f"{path}.", inner)


#: Types of optimizer that compute AdamW's update, in lower case.
_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "torchadam")
#: Types whose parameters are AdamW's.
_LIKE_ADAM = ("onebitadam", "zerooneadam")
#: Parameters of Adam that change nothing at these values.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "torch_adam": (True, False),
    "fused": (True, False),
    "foreach": (True, False),
    "set_grad_none": (True, False),
    "fp32_optimizer_states": (True,),
    "adam_w_mode": (True,),
    "bias_correction": (True,),
    "amsgrad": (False,),
    "maximize": (False,),
}


def _read_optimizer(reading: Reading) -> None:
    """Read an optimizer block as flags would be read."""
    kind, params = _block(reading, "optimizer")
    if kind is None:
        return
    is_adam = kind.lower() in _ADAM
    if is_adam and not params:
        _say_nothing(
            reading, "optimizer", "AdamW with llmscale's values; --lr, --beta1, --beta2, --weight-decay, --eps"
        )
        return
    keys: dict[str, object] = {"optimizer": "muon" if kind.lower() == "muon" else "adamw"}
    unknown = []
    for name, value in params.items():
        if name in ("lr", "eps", "weight_decay"):
            keys[name] = value
        elif name == "betas" and isinstance(value, list) and len(value) == 2:
            keys |= {f"beta{place}": beta for place, beta in enumerate(value, 1) if beta != AUTO}
        elif name == "max_grad_norm":
            if reading.config.get("gradient_clipping") in (None, AUTO):
                reading.config["gradient_clipping"] = value
        elif name == "adam_w_mode" and value is False and not params.get("weight_decay"):
            continue
        elif value not in _NEUTRAL.get(name, ()):
            unknown.append(name)
    if not is_adam:
        flags = _flags(keys if kind.lower() in _LIKE_ADAM else {"optimizer": keys["optimizer"]})
        other = "" if kind.lower() in _LIKE_ADAM else ", with --lr N where llmscale's own default is not meant"
        text = f"optimizer.type {show(kind)} is not Adam or AdamW. Delete 'optimizer' and give {flags}{other}."
        reading.drop(reading.problems, "optimizer", text)
        return
    for name in unknown:
        path = f"optimizer.params.{name}"
        text = f"{path} = {show(params[name])} is not among AdamW's lr, betas, eps and weight_decay. Delete it."
        reading.problems.append(delete(path, text))
    _take(reading, "optimizer", keys)


#: Schedules of DeepSpeed, each as llmscale's, and its parameters with the keys that they are.
_SCHEDULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "WarmupLR": ("constant", {"warmup_max_lr": "lr", "warmup_num_steps": "warmup_steps"}),
    "WarmupDecayLR": (
        "linear",
        {"warmup_max_lr": "lr", "warmup_num_steps": "warmup_steps", "total_num_steps": "decay_steps"},
    ),
    "WarmupCosineLR": (
        "cosine",
        {"warmup_num_steps": "warmup_steps", "total_num_steps": "decay_steps", "cos_min_ratio": "min_lr_frac"},
    ),
}
#: Parameters of DeepSpeed's warm-up, which is another curve than llmscale's straight line from 0.
_OF_WARMUP = ("warmup_min_lr", "warmup_min_ratio", "warmup_type", "last_batch_iteration")


def _read_scheduler(reading: Reading) -> None:
    """Read a scheduler block as flags would be read."""
    kind, params = _block(reading, "scheduler")
    if kind is None:
        return
    if kind not in _SCHEDULES:
        lr = params.get("cycle_max_lr", params.get("warmup_max_lr", "X"))
        legal = ", ".join(_SCHEDULES)
        text = f"scheduler.type {show(kind)} is not one of {legal}. Delete 'scheduler' and give --schedule "
        text += f"cosine, linear, constant or wsd, --lr {lr} and --warmup-steps N."
        reading.drop(reading.problems, "scheduler", text)
        return
    schedule, names = _SCHEDULES[kind]
    if not params:
        _say_nothing(reading, "scheduler", f"llmscale's schedule; --schedule {schedule} is {kind}'s shape")
        return
    keys: dict[str, object] = {"schedule": schedule}
    for name, value in params.items():
        if name in names:
            keys[names[name]] = value
        elif name not in _OF_WARMUP:
            path = f"scheduler.params.{name}"
            legal = ", ".join((*names, *_OF_WARMUP))
            reading.problems.append(delete(path, f"{path} is not among {kind}'s {legal}. Delete it."))
    warmup = [name for name in _OF_WARMUP if params.get(name) not in (None, 0, -1, "linear")]
    line = f" {', '.join(warmup)}: the warm-up is a straight line from 0." if warmup else ""
    _take(reading, "scheduler", keys, line)


def _block(reading: Reading, name: str) -> tuple[str | None, dict[str, object]]:
    """Return type and parameters of an optimizer or scheduler, without "auto"; a type of None for no block."""
    block = reading.config.get(name)
    if is_off(block):
        if name in reading.config:
            _say_nothing(reading, name, "llmscale's own")
        return None, {}
    kind = block.get("type") if isinstance(block, dict) else None
    params = block.get("params", {}) if isinstance(block, dict) else None
    if not isinstance(kind, str) or not isinstance(params, dict):
        text = (
            f'{name} = {show(block)}: must be an object {{"type": ..., "params": {{...}}}}. Write it so, or delete it.'
        )
        reading.drop(reading.problems, name, text)
        return None, {}
    for key in cast("dict[str, object]", block).keys() - {"type", "params", "legacy_fusion"}:
        reading.problems.append(
            delete(f"{name}.{key}", f"'{name}.{key}' is not a key that DeepSpeed reads. Delete it.")
        )
    given = {
        key: value for key, value in params.items() if value != AUTO and value != [AUTO, AUTO] and value is not None
    }
    return ("AdamW" if name == "optimizer" else "WarmupLR") if kind == AUTO else kind, given


def _say_nothing(reading: Reading, name: str, meaning: str) -> None:
    text = f'{name} holds nothing but "auto", which is {meaning}.'
    reading.drop(reading.notices, name, text)


def _take(reading: Reading, path: str, keys: Mapping[str, object], more: str = "") -> None:
    """Take an entry as keys of a run. A value that no run may have is a problem."""
    for key, value in keys.items():
        try:
            build_run_config({key: value})
        except ConfigError as error:
            text = f"{path} sets a key of the run wrongly: {error} Delete it and give --{key.replace('_', '-')}."
            reading.problems.append(delete(path, text))
        else:
            # DeepSpeed's scheduler sets the learning rate of its optimizer.
            reading.run_keys.setdefault(key, value)
    reading.config.pop(path, None)
    text = f"{path} is taken as {_flags(keys)}; a flag or the run file overrides it.{more}"
    reading.notices.append(Change(text, {}))


def _flags(keys: Mapping[str, object]) -> str:
    words = (f"--{key.replace('_', '-')}{'' if value is True else f' {value}'}" for key, value in keys.items())
    return " ".join(words)
