"""Find the keys of a ds_config that make DeepSpeed 0.19.8 crash, or train something else than written.

`find_problems` returns the problems of a file, `ignored_keys` the keys without effect.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmscale.config.deepspeed.foreign import DELETED, Change, Reading, apply_edits, delete
from llmscale.config.deepspeed.schema import DsFile, Section, marks_of, section_at, show
from llmscale.config.optimizers import ADAMW
from llmscale.suggestions import describe_invalid, names_meant

#: Tensors of a sub-group that DeepSpeed swaps at once: parameter, gradient and AdamW's states.
_SWAP_BUFFERS = 2 + max(len(group.states) for group in ADAMW.groups)
_ZERO = "zero_optimization"


def refusals(keys: DsFile) -> Iterator[Change]:
    """Yield each combination of keys that DeepSpeed cannot train as written."""
    yield from _offload_refusals(keys)
    yield from _precision_refusals(keys)
    yield from _bf16_state_refusals(keys)
    yield from _gradient_refusals(keys)


def _offload_refusals(keys: DsFile) -> Iterator[Change]:
    zero = keys.zero
    stage = keys.zero.stage
    states = f"{_ZERO}.offload_optimizer"
    parameters = f"{_ZERO}.offload_param"
    if keys.offload_param_device != "none" and stage < 3:
        why = f"needs stage 3; at stage {stage} DeepSpeed ignores it. Set stage to 3, or delete offload_param."
        yield delete(parameters, f"{parameters} {why}")
    if keys.offload_param_device != "none" and zero.zero_hpz_partition_size > 1:
        path = f"{_ZERO}.zero_hpz_partition_size"
        why = "keeps a second copy of the parameters on the GPUs, and offload_param takes them away from there"
        yield delete(path, f"{path} {why}. Delete one of them.")
    if keys.offload_optimizer_device != "none" and stage == 0:
        why = "needs stage 1, 2 or 3; at stage 0 DeepSpeed ignores it. Set stage to 1, or delete offload_optimizer."
        yield Change(f"{states} {why}", {f"{_ZERO}.stage": 1})
    if keys.offload_optimizer_device == "nvme" and stage in (1, 2):
        why = f"needs stage 3; at stage {stage} DeepSpeed uses the host memory instead"
        yield Change(f'{states}.device "nvme" {why}. Write "cpu", or set stage to 3.', {f"{states}.device": "cpu"})
    for path, section in ((states, zero.offload_optimizer), (parameters, zero.offload_param)):
        if section and section.device == "nvme" and section.nvme_path is None:
            why = "needs nvme_path: a folder on the local NVMe disk of every host"
            yield Change(f'{path}.device "nvme" {why}.', {f"{path}.nvme_path": "/local_nvme"})
    offload = zero.offload_optimizer
    if offload and offload.ratio != 1.0:
        why = "needs DeepSpeed's own CPU Adam, llmscale passes torch.optim.AdamW"
        path = f"{states}.ratio"
        yield delete(path, f"{path} {offload.ratio} {why}. Delete it: all states are offloaded.")
    if offload and offload.device == "nvme" and offload.buffer_count < _SWAP_BUFFERS:
        why = f"is too small: AdamW needs {_SWAP_BUFFERS} (parameter, gradient, two moments)"
        path = f"{states}.buffer_count"
        yield delete(path, f"{path} {offload.buffer_count} {why}. Delete it, or write {_SWAP_BUFFERS}.")


def _precision_refusals(keys: DsFile) -> Iterator[Change]:
    sections = {"bf16": keys.bf16, "fp16": keys.fp16, "torch_autocast": keys.torch_autocast}
    enabled = [name for name, section in sections.items() if section is not None and section.enabled is True]
    if len(enabled) > 1:
        why = "are both enabled. Keep one precision and delete the other."
        yield Change(f"{' and '.join(enabled)} {why}", {f"{name}.enabled": False for name in enabled[1:]})
    stage = keys.zero.stage
    dtype = keys.model_dtype
    if dtype == "fp16" and stage == 0:
        yield Change(
            "fp16 does not train at stage 0: DeepSpeed divides the gradients by a loss scale that it never applied to "
            "the loss. Set zero_optimization.stage to 1, or use bf16.",
            {f"{_ZERO}.stage": 1},
        )
    fp16 = keys.fp16
    if fp16 and fp16.min_loss_scale > 2**fp16.initial_scale_power:
        why = f"is above the first scale, 2**initial_scale_power = {2**fp16.initial_scale_power}"
        yield delete("fp16.min_loss_scale", f"fp16.min_loss_scale {fp16.min_loss_scale} {why}. Lower it, or delete it.")
    types = keys.data_types
    if types and types.param_dtype and types.param_dtype != dtype:
        why = f"contradicts the precision {keys.precision}, whose parameters are {dtype}. Delete it."
        yield delete("data_types.param_dtype", f"data_types.param_dtype {types.param_dtype} {why}")
    legal = sorted({dtype, "fp32"})
    if types and types.grad_accum_dtype and types.grad_accum_dtype not in legal:
        why = f"cannot be used with precision {keys.precision} at stage {stage}. Legal: {', '.join(legal)}."
        yield delete("data_types.grad_accum_dtype", f"data_types.grad_accum_dtype {types.grad_accum_dtype} {why}")


def _bf16_state_refusals(keys: DsFile) -> Iterator[Change]:
    """Yield what DeepSpeed refuses beside bf16 master weights and moments, or where it keeps fp32 without a word."""
    if keys.precision != "bf16" or keys.bf16 is None:
        return
    master = "bf16_master_weights_and_grads"
    states = "bf16_optimizer_states"
    stage = keys.zero.stage
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
    zero = keys.zero
    if keys.communication_data_type == "fp16" and keys.precision != "fp16":
        why = f"overflows with precision {keys.precision}, whose loss is not scaled. Use bf16 or fp32."
        yield delete("communication_data_type", f"communication_data_type fp16 {why}")
    if keys.gradient_allreduce_op == "sum":
        why = "makes gradients grow with the number of ranks: the loss curve would depend on the world size"
        yield delete("gradient_allreduce_op", f'gradient_allreduce_op "sum" {why}. Delete it ("mean").')
    if stage >= 2 and zero.reduce_scatter and (keys.prescale_gradients or keys.gradient_predivide_factor != 1.0):
        yield Change(
            f"prescale_gradients and gradient_predivide_factor stop DeepSpeed at stage {stage} with reduce_scatter. "
            "Delete them, or set zero_optimization.reduce_scatter to false.",
            {"prescale_gradients": DELETED, "gradient_predivide_factor": DELETED},
        )
    if keys.gradient_predivide_factor == 0:
        yield delete("gradient_predivide_factor", "gradient_predivide_factor must be above 0. Delete it.")
    size = zero.allgather_bucket_size
    if stage in (1, 2) and size % 2:
        path = f"{_ZERO}.allgather_bucket_size"
        yield Change(f"{path} {size} must be even: DeepSpeed aligns it to 4 bytes.", {path: size + 1})


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
    try:
        return reading.problems + list(refusals(DsFile.model_validate(reading.config)))
    except ValidationError as error:
        wrong = error.errors()
    problems = reading.problems + list(_explain_all(wrong, reading.config))
    legal = copy.deepcopy(reading.config)
    apply_edits(legal, {_dotted(detail): DELETED for detail in wrong})
    with suppress(ValidationError):  # a required key is missing
        problems += refusals(DsFile.model_validate(legal))
    return problems


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
    dotted = _dotted(detail)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(dotted, config)
    if kind == "missing":
        default, means = (0, "0 (nothing is sharded)") if dotted.endswith("stage") else (False, "false")
        return Change(f"{dotted} is missing, DeepSpeed would silently take {means}. Write it.", {dotted: default})
    text = describe_invalid(dotted, detail, show)
    meant = _meant(dotted, detail["input"])
    if meant is None:
        return delete(dotted, f"{text} Write another, or delete it.")
    return Change(f"{text} Write {show(meant)}.", {dotted: meant})


def _meant(dotted: str, value: object) -> object:
    """Return the legal value for one that is quoted, or for a section that is a boolean or a stage; None for others."""
    candidates: list[object]
    if isinstance(value, int):
        candidates = [{"enabled": value}, {"stage": int(value)}]
    else:
        candidates = []
    with suppress(ValueError):
        candidates += [json.loads(value.lower())] if isinstance(value, str) else []
    for candidate in candidates:
        config: dict[str, object] = {_ZERO: {"stage": 0}}
        apply_edits(config, {dotted: candidate})
        with suppress(ValidationError):
            DsFile.model_validate(config)
            return candidate
    return None


def _legal_keys() -> dict[str, list[str]]:
    """Return the keys of every section by its path, from the top level down."""
    keys: dict[str, list[str]] = {}
    pending: list[tuple[str, type[Section]]] = [("", DsFile)]
    while pending:
        path, section = pending.pop(0)
        keys[path] = sorted(section.model_fields)
        inner = ((name, section_at(section, name)) for name in section.model_fields)
        pending += [(f"{path}.{name}".lstrip("."), kind) for name, kind in inner if kind]
    return keys


_LEGAL_KEYS = _legal_keys()


def _unknown_key(dotted: str, config: dict[str, object]) -> Change:
    """Return the sentence about an unknown key, and the edit that moves a misplaced or misspelt one's value.

    A value moves to the only key that may hold it. A section never moves to the place of a number, nor the reverse.
    """
    section, _, key = dotted.rpartition(".")
    legal = _LEGAL_KEYS.get(section, _LEGAL_KEYS[""])
    # A key that itself contains dots has no value at its path, and is deleted.
    value = Reading(config).value_at(dotted)
    homes = [path for path, names in _LEGAL_KEYS.items() if key in names and _is_alike(_join(path, key), value)]
    meant = [name for name in names_meant(key, legal) if _is_alike(_join(section, name), value)]
    if homes:
        hint = f" It belongs in {' or '.join(home or 'the top level' for home in homes)}."
        targets = [_join(home, key) for home in homes]
    elif meant:
        hint = f" Did you mean {' or '.join(map(repr, meant))}?"
        targets = [_join(section, name) for name in meant]
    else:
        kind = f"keys of {section}" if section else "top-level keys"
        hint = f" Delete it. Legal {kind}: {', '.join(legal)}."
        targets = []
    edits = {dotted: DELETED}
    for target in targets if len(targets) == 1 and value is not None else ():
        if _takes(target, value) and Reading(config).value_at(target) is None:
            edits[target] = value
    return Change(f"'{dotted}' is not a key that DeepSpeed reads.{hint}", edits)


def _join(section: str, key: str) -> str:
    return f"{section}.{key}".lstrip(".")


def _is_alike(dotted: str, value: object) -> bool:
    """Return whether a value may have been meant for a key: both are sections with a key in common, or neither is."""
    keys = _LEGAL_KEYS.get(dotted)
    if isinstance(value, dict):
        return keys is not None and (not value or any(key in keys for key in value))
    return value is None or keys is None or _meant(dotted, value) is not None


def _takes(dotted: str, value: object) -> bool:
    """Return whether a key takes a value, as it is or as `_meant` reads it."""
    if isinstance(value, dict):
        return True
    config: dict[str, object] = {_ZERO: {"stage": 0}}
    apply_edits(config, {dotted: value})
    try:
        DsFile.model_validate(config)
    except ValidationError:
        return _meant(dotted, value) is not None
    return True
