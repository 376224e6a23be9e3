"""Find the keys of a ds_config that make DeepSpeed 0.19.8 crash, or train something else than written.

`find_problems` returns the problems of a file, `ignored_keys` the keys without effect.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmscale.config.deepspeed.foreign import DELETED, Change, Reading, apply_edits, delete
from llmscale.config.deepspeed.schema import (
    DsFile,
    OffloadOptimizer,
    OffloadParam,
    Section,
    marks_of,
    section_at,
    show,
)
from llmscale.config.optimizers import ADAMW
from llmscale.suggestions import describe_invalid, did_you_mean

#: Tensors of a sub-group that DeepSpeed swaps at once: parameter, gradient and AdamW's states.
_SWAP_BUFFERS = 2 + max(len(group.states) for group in ADAMW.groups)


def refusals(keys: DsFile) -> Iterator[Change]:
    """Yield each combination of keys that DeepSpeed cannot train as written."""
    yield from _offload_refusals(keys)
    yield from _host_state_refusals(keys)
    yield from _precision_refusals(keys)
    yield from _bf16_state_refusals(keys)
    yield from _gradient_refusals(keys)


def _offload_refusals(keys: DsFile) -> Iterator[Change]:
    stage, optimizer, parameters = keys.zero.stage, keys.offload_optimizer_device, keys.offload_param_device
    zero = "zero_optimization"
    if parameters != "none" and stage < 3:
        yield delete(
            f"{zero}.offload_param",
            f"zero_optimization.offload_param needs stage 3; at stage {stage} DeepSpeed ignores it. Set "
            "stage to 3, or delete offload_param.",
        )
    if parameters != "none" and keys.zero.zero_hpz_partition_size > 1:
        yield delete(
            f"{zero}.zero_hpz_partition_size",
            "zero_optimization.zero_hpz_partition_size keeps a second copy of the parameters on the GPUs, and "
            "offload_param takes them away from there. Delete one of them.",
        )
    if optimizer != "none" and stage == 0:
        yield Change(
            "zero_optimization.offload_optimizer needs stage 1, 2 or 3; at stage 0 DeepSpeed ignores it. Set "
            "stage to 1, or delete offload_optimizer.",
            {f"{zero}.stage": 1},
        )
    if optimizer == "nvme" and stage in (1, 2):
        yield Change(
            f'zero_optimization.offload_optimizer.device "nvme" needs stage 3; at stage {stage} DeepSpeed '
            'uses the host memory instead. Write "cpu", or set stage to 3.',
            {f"{zero}.offload_optimizer.device": "cpu"},
        )
    sections: tuple[tuple[str, OffloadOptimizer | OffloadParam | None], ...] = (
        ("offload_optimizer", keys.zero.offload_optimizer),
        ("offload_param", keys.zero.offload_param),
    )
    for name, section in sections:
        if section and section.device == "nvme" and section.nvme_path is None:
            yield Change(
                f'zero_optimization.{name}.device "nvme" needs nvme_path: a folder on the local NVMe disk '
                "of every host.",
                {f"{zero}.{name}.nvme_path": "/local_nvme"},
            )


def _host_state_refusals(keys: DsFile) -> Iterator[Change]:
    zero, states = "zero_optimization", keys.zero.offload_optimizer
    if states and states.ratio != 1.0:
        yield delete(
            f"{zero}.offload_optimizer.ratio",
            f"{zero}.offload_optimizer.ratio {states.ratio} needs DeepSpeed's own CPU Adam, "
            "llmscale passes torch.optim.AdamW. Delete it: all states are offloaded.",
        )
    if states and states.device == "nvme" and states.buffer_count < _SWAP_BUFFERS:
        yield delete(
            f"{zero}.offload_optimizer.buffer_count",
            f"{zero}.offload_optimizer.buffer_count {states.buffer_count} is too small: AdamW "
            f"needs {_SWAP_BUFFERS} (parameter, gradient, two moments). Delete it, or write {_SWAP_BUFFERS}.",
        )


def _precision_refusals(keys: DsFile) -> Iterator[Change]:
    switched_on = [
        name
        for name in ("bf16", "fp16", "torch_autocast")
        if (section := getattr(keys, name)) is not None and section.enabled is True
    ]
    if len(switched_on) > 1:
        yield Change(
            f"{' and '.join(switched_on)} are both enabled. Keep one precision and delete the other.",
            {f"{name}.enabled": False for name in switched_on[1:]},
        )
    stage, dtype = keys.zero.stage, keys.model_dtype
    if dtype == "fp16" and stage == 0:
        yield Change(
            "fp16 does not train at stage 0: DeepSpeed divides the gradients by a loss scale that it never "
            "applied to the loss. Set zero_optimization.stage to 1, or use bf16.",
            {"zero_optimization.stage": 1},
        )
    if keys.fp16 and keys.fp16.min_loss_scale > 2**keys.fp16.initial_scale_power:
        yield delete(
            "fp16.min_loss_scale",
            f"fp16.min_loss_scale {keys.fp16.min_loss_scale} is above the first scale, "
            f"2**initial_scale_power = {2**keys.fp16.initial_scale_power}. Lower it, or delete it.",
        )
    types = keys.data_types
    if types and types.param_dtype and types.param_dtype != dtype:
        yield delete(
            "data_types.param_dtype",
            f"data_types.param_dtype {types.param_dtype} contradicts the precision {keys.precision}, whose "
            f"parameters are {dtype}. Delete it.",
        )
    accumulation = types.grad_accum_dtype if types else None
    legal = {dtype, "fp32"}
    if accumulation and accumulation not in legal:
        yield delete(
            "data_types.grad_accum_dtype",
            f"data_types.grad_accum_dtype {accumulation} cannot be used with precision {keys.precision} at "
            f"stage {stage}. Legal: {', '.join(sorted(legal))}.",
        )


def _bf16_state_refusals(keys: DsFile) -> Iterator[Change]:
    """Yield what DeepSpeed refuses beside bf16 master weights and moments, or where it keeps fp32 without a word."""
    if keys.precision != "bf16" or keys.bf16 is None:
        return
    master, states, stage = "bf16_master_weights_and_grads", "bf16_optimizer_states", keys.zero.stage
    if keys.bf16.bf16_master_weights_and_grads != keys.bf16.bf16_optimizer_states:
        yield Change(
            f"bf16.{master} and bf16.{states} need each other: DeepSpeed takes one alone only with its own CPU Adam, "
            "and llmscale passes torch.optim.AdamW. Write both, or neither.",
            {f"bf16.{master}": True, f"bf16.{states}": True},
        )
    elif keys.has_bf16_states and keys.offload_optimizer_device != "none":
        yield Change(
            f"bf16.{states} needs the states on the GPU: with offload_optimizer DeepSpeed steps bf16 states only with "
            f"its own CPU Adam, and llmscale passes torch.optim.AdamW. Delete offload_optimizer, or {master} and "
            f"{states}.",
            {f"bf16.{master}": DELETED, f"bf16.{states}": DELETED},
        )
    elif keys.has_bf16_states and stage == 0:
        yield Change(
            f"bf16.{states} needs stage 1, 2 or 3: DeepSpeed has no bf16 states at stage 0. Set "
            f"zero_optimization.stage to 1, or delete {master} and {states}.",
            {"zero_optimization.stage": 1},
        )
    elif keys.has_bf16_states and stage == 1 and keys.data_types and keys.data_types.grad_accum_dtype == "fp32":
        yield delete(
            "data_types.grad_accum_dtype",
            f"data_types.grad_accum_dtype fp32 makes DeepSpeed ignore bf16.{states} at stage 1 (its BF16_Optimizer "
            "keeps fp32 states). Set zero_optimization.stage to 2, or delete grad_accum_dtype: gradients of "
            "micro-batches are then summed in bf16.",
        )


def _gradient_refusals(keys: DsFile) -> Iterator[Change]:
    stage = keys.zero.stage
    if keys.communication_data_type == "fp16" and keys.precision != "fp16":
        yield delete(
            "communication_data_type",
            f"communication_data_type fp16 overflows with precision {keys.precision}, whose loss is not "
            "scaled. Use bf16 or fp32.",
        )
    if keys.gradient_allreduce_op == "sum":
        yield delete(
            "gradient_allreduce_op",
            'gradient_allreduce_op "sum" makes gradients grow with the number of ranks: the loss curve would '
            'depend on the world size. Delete it ("mean").',
        )
    if stage >= 2 and keys.zero.reduce_scatter and (keys.prescale_gradients or keys.gradient_predivide_factor != 1.0):
        yield Change(
            f"prescale_gradients and gradient_predivide_factor stop DeepSpeed at stage {stage} with "
            "reduce_scatter. Delete them, or set zero_optimization.reduce_scatter to false.",
            {"prescale_gradients": DELETED, "gradient_predivide_factor": DELETED},
        )
    if keys.gradient_predivide_factor == 0:
        yield delete("gradient_predivide_factor", "gradient_predivide_factor must be above 0. Delete it.")
    if stage in (1, 2) and keys.zero.allgather_bucket_size % 2:
        yield Change(
            f"zero_optimization.allgather_bucket_size {keys.zero.allgather_bucket_size} must be even: "
            "DeepSpeed aligns it to 4 bytes.",
            {"zero_optimization.allgather_bucket_size": keys.zero.allgather_bucket_size + 1},
        )


def ignored_keys(keys: DsFile) -> Iterator[str]:
    """Yield a message for each written key that has no effect."""
    for prefix, section in _written_sections("", keys):
        for name in sorted(section.model_fields_set):
            for mark in marks_of(type(section), name):
                if mark.when(keys, section):
                    yield f"{prefix}{name} has no effect{mark.why.format(section)}."


def _written_sections(prefix: str, section: Section) -> Iterator[tuple[str, Section]]:
    """Yield a section and those within it, each with the beginning of its keys' paths."""
    yield prefix, section
    for name in sorted(section.model_fields_set):
        if isinstance(inner := getattr(section, name), Section):
            yield from _written_sections(f"{prefix}{name}.", inner)


def find_problems(reading: Reading) -> list[Change]:
    """Return every problem of a file, the worst first; empty if DeepSpeed would train as written."""
    config = reading.config
    try:
        return reading.problems + list(refusals(DsFile.model_validate(config)))
    except ValidationError as error:
        wrong = error.errors()
    legal = copy.deepcopy(config)
    apply_edits(legal, {_dotted(detail): DELETED for detail in wrong})
    return reading.problems + list(_explain_all(wrong, config)) + _refusals_of_the_rest(legal)


def _refusals_of_the_rest(config: dict[str, object]) -> list[Change]:
    """Return the problems between the legal keys; empty if a required key is missing."""
    try:
        return list(refusals(DsFile.model_validate(config)))
    except ValidationError:
        return []


def _dotted(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _explain_all(wrong: list[ErrorDetails], config: dict[str, object]) -> Iterator[Change]:
    """Yield pydantic's errors as sentences. Those about unknown keys list a section's legal keys once."""
    listed = set()
    for detail in wrong:
        change = _explain(detail, config)
        text, _, legal = change.text.partition(" Legal ")
        if detail["type"] == "extra_forbidden" and legal in listed:
            change = change._replace(text=text)
        listed.add(legal)
        yield change


def _explain(detail: ErrorDetails, config: dict[str, object]) -> Change:
    """Return one of pydantic's errors as a sentence with the path, the value and the legal values."""
    dotted, kind = _dotted(detail), detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(dotted, detail["input"], config)
    if kind == "missing":
        default = 0 if dotted.endswith("stage") else False
        means = "0 (nothing is sharded)" if dotted.endswith("stage") else "false"
        return Change(f"{dotted} is missing, DeepSpeed would silently take {means}. Write it.", {dotted: default})
    meant = _meant(dotted, detail["input"])
    if meant is not None:
        return Change(f"{describe_invalid(dotted, detail, show)} Write {show(meant)}.", {dotted: meant})
    return delete(dotted, f"{describe_invalid(dotted, detail, show)} Write another, or delete it.")


def _meant(dotted: str, value: object) -> object:
    """Return the legal value for one that is quoted, or for a section that is a boolean or a stage; None for others."""
    config: dict[str, object] = {"zero_optimization": {"stage": 0}}
    with suppress(ValueError):
        meant = json.loads(value.lower()) if isinstance(value, str) else None
        if isinstance(value, int):
            meant = {"enabled": value} if isinstance(value, bool) else {"stage": value}
        apply_edits(config, {dotted: meant})
        DsFile.model_validate(config)
        return meant
    return None


def _unknown_key(dotted: str, value: object, config: dict[str, object]) -> Change:
    *parents, key = dotted.split(".")
    section: type[Section] | None = DsFile
    for name in parents:
        section = section_at(section, name) if section else None
    known = sorted((section or DsFile).model_fields)
    home = _home_of(key)
    hint = f" It belongs in {home or 'the top level'}." if home is not None else did_you_mean(key, known)
    if not hint:
        place = f"keys of {'.'.join(parents)}" if parents else "top-level keys"
        hint = f" Delete it. Legal {place}: {', '.join(known)}."
    text = f"'{dotted}' is not a key that DeepSpeed reads.{hint}"
    return Change(text, {dotted: DELETED} | _rename(hint, parents, home, key, value, config))


def _rename(
    hint: str, parents: list[str], home: str | None, key: str, value: object, config: dict[str, object]
) -> dict[str, object]:
    """Return the edit that writes a misplaced or misspelt key's value where it belongs; empty if that is unclear."""
    meant = re.fullmatch(r" Did you mean '(\w+)'\?", hint)
    if home is not None:
        path = [*home.split("."), key] if home else [key]
    elif meant:
        path = [*parents, meant[1]]
    else:
        return {}
    section: object = config
    for name in path:
        if not isinstance(section, dict) or name not in section:
            return {".".join(path): value}
        section = section[name]
    return {}


def _home_of(key: str) -> str | None:
    """Return the path of the section to which a key belongs, empty for the top level; None if the key is unknown."""
    pending: list[tuple[str, type[Section]]] = [("", DsFile)]
    while pending:
        prefix, section = pending.pop(0)
        if key in section.model_fields:
            return prefix.rstrip(".")
        inner = ((name, section_at(section, name)) for name in section.model_fields)
        pending += [(f"{prefix}{name}.", sub) for name, sub in inner if sub]
    return None
