"""What is wrong with a ds_config, all of it at once: keys, types, values, and how they go together. No torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmscale.config.deepspeed.fields import AUTO, show
from llmscale.config.deepspeed.rules import refusals
from llmscale.config.deepspeed.sections import DsFile, Section
from llmscale.config.deepspeed.unsupported import UNSUPPORTED
from llmscale.suggestions import did_you_mean

#: Where "auto" is filled in by llmscale.config.deepspeed.resolve. Anywhere else DeepSpeed would take its default.
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
    """One sentence or two each, the worst first; none when DeepSpeed would train what is written."""
    unsupported = list(_unsupported(config))
    try:
        return unsupported + list(refusals(DsFile.model_validate(config)))
    except ValidationError as error:
        wrong = [detail for detail in error.errors() if not _is_unsupported(detail)]
        legal = _without(config, error.errors())
    return unsupported + [_explain(detail) for detail in wrong] + _refusals_of_the_rest(legal)


def _is_unsupported(detail: ErrorDetails) -> bool:
    """Named already, with the reason."""
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
    """How the legal keys go together. Nothing when one is missing that the others need."""
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
    """One of pydantic's errors as a sentence that names the path, the value and the legal ones."""
    path = tuple(str(part) for part in detail["loc"])
    dotted, value, kind = ".".join(path), detail["input"], detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if value == AUTO:
        return (
            f'{dotted} is "auto", which DeepSpeed would silently replace by its default. Write a value or '
            "delete the "
            f"key. llmscale fills: {', '.join(AUTO_KEYS)}."
        )
    if kind == "missing":
        default = "0 (nothing is sharded)" if path[-1] == "stage" else "false"
        return f"{dotted} is missing, DeepSpeed would silently take {default}. Write it."
    if kind == "model_type":
        return f"{dotted} must be an object {{...}}, not {show(value)}."
    if kind == "literal_error":
        return f"{dotted} must be {detail['ctx']['expected']}, not {show(value)}."
    message = str(detail["ctx"]["error"]) if kind == "value_error" else f"{detail['msg']}, not {show(value)}."
    return f"{dotted} {message}"


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
    """Where a key belongs that was written at the wrong level."""
    pending: list[tuple[str, type[Section]]] = [("", DsFile)]
    while pending:
        prefix, section = pending.pop(0)
        if key in section.model_fields:
            return f" It belongs in {prefix.rstrip('.') or 'the top level'}."
        pending += [(f"{prefix}{name}.", sub) for name, sub in _subsections(section).items()]
    return ""
