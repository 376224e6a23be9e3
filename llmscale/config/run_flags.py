"""Flags for the keys of a run: names, texts and sections come from the source of RunConfig, values are checked by it.

Neither pydantic nor torch is imported, so that help is printed at once.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from llmscale.config.command_line import FlagContainer

#: Types that a key's annotation may name; all others are text.
_TYPES = {"bool": bool, "list": list, "int": int, "float": float}
#: File with the types of numbers.
_UNITS = "limits.py"
#: Classes that declare keys, in the order of the help: file, class, section of a file without comments.
_CLASSES = (
    ("config/run_config.py", "FirstKeys", ""),
    ("architecture/shape.py", "GPTShape", "model"),
    ("config/run_config.py", "RunConfig", ""),
)


#: Where a text begins to say what the default is.
_OWN_DEFAULT = re.compile(r"[;.]\s+[Dd]efault\b")


class KeyText(NamedTuple):
    """Documentation of one key of a run."""

    section: str
    """Comment above the key's group."""
    text: str
    """Docstring of the key."""
    kind: type
    """bool, list, int, float, or else str."""
    metavar: str
    asked_by: tuple[str, ...]
    """Commands besides `train` that have this flag."""
    asked_default: str
    """Its default in these commands; empty if it is the key's own."""
    default: str
    """Its own default, if that is a number in the source."""
    usual: bool
    """True if `train --help` shows it."""

    @property
    def short_text(self) -> str:
        """First sentence of its documentation, or what a semicolon ends."""
        return re.split(r"(?<![.])[;.]\s", self.text)[0].removesuffix(".") + "."

    @property
    def asked_text(self) -> str:
        """Documentation in these commands, with their default in place of the key's own."""
        default = self.asked_default or self.default
        if default:
            return f"{_OWN_DEFAULT.split(self.text)[0].removesuffix('.')}; default: {default}."
        return self.text


@cache
def describe_keys() -> dict[str, KeyText]:
    """Return the documentation of every key, in order, from the source files of the classes that declare them."""
    texts: dict[str, KeyText] = {}
    for file, name, section in _CLASSES:
        lines, named = _read_file(file)
        named = {**_read_file(_UNITS)[1], **named}
        for key, text in pairwise(named[name].body):  # type: ignore[attr-defined]
            if not (isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr)):
                continue
            above = lines[key.lineno - 2].strip()
            if above.startswith("# "):
                section = above.removeprefix("# ")
            # `key(...)` is the value, `shape_key(...)` within the type; other fields are not keys.
            for call in ast.walk(key):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("key", "shape_key"):
                    documented = inspect.cleandoc(ast.literal_eval(text.value))
                    texts[key.target.id] = _read_key(section, documented, _kind(key.annotation, named), call)
    return texts


@cache
def _read_file(file: str) -> tuple[list[str], dict[str, ast.AST]]:
    """Return the lines of a file of the package, and its classes and the values of its variables by name."""
    source = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    named: dict[str, ast.AST] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            named[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node.value
    return source.splitlines(), named


def _kind(annotation: ast.AST, named: Mapping[str, ast.AST]) -> type:
    """Return the type that an annotation names, itself or by an alias of its file: `Steps | None` is int."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        annotation = annotation.slice.elts[0]  # type: ignore[attr-defined]
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)}
    kinds = [kind for name, kind in _TYPES.items() if name in names]
    return next(iter(kinds + [_kind(named[name], named) for name in names & named.keys()]), str)


def _read_key(section: str, text: str, kind: type, call: ast.Call) -> KeyText:
    words = {word.arg: word.value for word in call.keywords}
    if ast.unparse(call.func) == "shape_key" and "run_default" not in words and "default:" not in text:
        text = f"{text.removesuffix('.')}; default: the preset's."
    literals = ("metavar", "asked_by", "asked_default", "usual")
    given = [ast.literal_eval(words[word]) if word in words else "" for word in literals]
    metavar, asked_by, asked_default, usual = given
    if call.args and isinstance(call.args[0], ast.Constant):
        value = call.args[0].value
    else:
        value = None
    if type(value) in (int, float):
        default = show_default(value)
    else:
        default = ""
    return KeyText(section, text, kind, metavar, tuple(asked_by), asked_default, default, bool(usual))


def model_keys() -> list[str]:
    """Return the keys in the section of the model: its name, its shape, and what follows from the data."""
    return [key for key, documented in describe_keys().items() if documented.section == "model"]


def keys_asked_by(command: str) -> list[str]:
    """Return the keys of a run that are flags of `command` besides the model's."""
    return [key for key, documented in describe_keys().items() if command in documented.asked_by]


def flag_words(key: str, value: object) -> list[str]:
    """Return `--key value` in train.py's spelling."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    # argparse takes a word that begins with a dash as the next flag.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def literal_words(annotation: object) -> Iterator[str]:
    """Yield the words of every Literal within a type."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for inner in get_args(annotation):
            yield from literal_words(inner)


def add_run_flags(
    parser: FlagContainer,
    keys: Iterable[str],
    *,
    annotations: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
    is_asked: bool = False,
    is_short: bool = False,
) -> None:
    """Add a flag for each of these keys of a run.

    Values stay text (True or False for switches, lists for keys with several values), for `build_run_config` to check;
    flags that are not given are None. The words of a Literal in `annotations` and the `defaults` are shown in the help.
    `is_asked`: for a command besides `train`. `is_short`: with the first sentence alone.
    """
    for key in keys:
        documented = describe_keys()[key]
        option = f"--{key.replace('_', '-')}"
        default = (defaults or {}).get(key)
        settings: dict[str, Any] = {}
        if documented.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            words = "|".join(literal_words((annotations or {}).get(key)))
            settings["metavar"] = documented.metavar or words or {int: "N", float: "X"}.get(documented.kind, "NAME")
            if documented.kind is list:
                settings["action"] = "append"
        if is_asked:
            text = documented.asked_text
        elif is_short:
            text = documented.short_text
        else:
            text = documented.text
        if default not in (None, "", []) and not (is_short and default is False):
            text += f" Default: {show_default(default)}."
        parser.add_argument(option, help=text.replace("%", "%%"), **settings)


def show_default(value: object) -> str:
    """Return a default for a reader: on, 0.1, adamw; text that ends with a space in quotes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        text = f"{value:g}"
    else:
        text = str(value)
    return text if text == text.strip() else f'"{text}"'
