"""Flags for the keys of a run: names, texts and sections come from the source of RunConfig, values are checked by it.

Neither pydantic nor torch is imported, so that help is printed at once.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import types
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from llmscale.config.command_line import FlagContainer

#: Metavars where the type of a key does not name one.
_METAVARS = {
    **{"config": "FILE", "ds": "FILE|NAME", "model": "PRESET|hf:NAME", "rope_scaling": "KIND[:NUMBERS]"},
    **{"data": "FOLDER|URL", "text": "FOLDER|FILE", "data_cache": "FOLDER", "skip_steps": "A:B"},
    **{"sample_prompt": "TEXT", "tokenizer": "gpt2|bytes|FILE.tiktoken|FOLDER|NAME"},
    **{"sample_prompts": "FILE", "eval_tasks": "FORMAT=FILE", "run": "FOLDER", "resume": "auto|none|best|CHECKPOINT"},
    **{"init_from": "RUN|hf:NAME", "allow_changed": "KEY", "profile": "A:B", "notify": "COMMAND"},
    **{"param_group": "PATTERN:lr=Fx:decay=D", "freeze": "PATTERN"},
    **{"save_every_minutes": "MINUTES", "cache_limit_gib": "GIB", "seq_len": "T", "vocab_size": "V"},
}


class KeyText(NamedTuple):
    """Documentation of one key of a run."""

    section: str
    """Comment above the key's group in RunConfig."""
    text: str
    """Docstring of the key."""


@cache
def describe_keys() -> dict[str, KeyText]:
    """Return the documentation of every key, in order, from the source file of RunConfig."""
    source = Path(__file__).with_name("run_config.py").read_text(encoding="utf-8")
    (definition,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    lines, section, texts = source.splitlines(), "", {}
    for key, text in pairwise(definition.body):
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr):
            above = lines[key.lineno - 2].strip()
            section = above.removeprefix("# ") if above.startswith("# ") else section
            texts[key.target.id] = KeyText(section, inspect.cleandoc(ast.literal_eval(text.value)))
    return texts


def literal_words(annotation: object) -> Iterator[str]:
    """Yield the words of every Literal within a type."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for inner in get_args(annotation):
            yield from literal_words(inner)


def add_run_flags(
    parser: FlagContainer,
    annotations: Mapping[str, object],
    *,
    defaults: Mapping[str, object] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each key in `annotations`, which maps keys of a run to their types.

    Values stay text (True or False for switches, lists for keys with several values), for `build_run_config` to check;
    flags that are not given are None. `defaults` are shown in the help; `texts` replace the documentation of keys.
    """
    documented = describe_keys()
    for key, annotation in annotations.items():
        option, default = f"--{key.replace('_', '-')}", (defaults or {}).get(key)
        settings: dict[str, Any] = {}
        if bool in _members(annotation):
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = _METAVARS.get(key) or _metavar(annotation)
            if any(get_origin(member) is list for member in _members(annotation)):
                settings["action"] = "append"
        text = (texts or {}).get(key) or documented[key].text
        if default not in (None, "", []):
            text += f" Default: {show_default(default)}."
        parser.add_argument(option, help=text.replace("%", "%%"), **settings)


def _members(annotation: object) -> tuple[object, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)


def _metavar(annotation: object) -> str:
    if words := [*literal_words(annotation)]:
        return "|".join(words)
    members = _members(annotation)
    return "N" if int in members else "X" if float in members else "NAME"


def show_default(value: object) -> str:
    """Return a default for a reader: on, 0.1, adamw; text that ends with a space in quotes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text == text.strip() else f'"{text}"'
