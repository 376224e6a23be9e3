"""Parse JSON, YAML and TOML of bounded size into plain values or dataclasses; nothing else in llmscale parses them.

Any content gives a value or a one-line error that names the file: invalid UTF-8, duplicate keys, a list instead of an
object. Callers explain a missing file themselves (FileNotFoundError, NotADirectoryError).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from llmscale.errors import LlmscaleError
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.untrusted.paths import open_regular, read_regular
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    import yaml
    from pydantic import TypeAdapter

_T = TypeVar("_T")

#: Largest file that people write: run files, ds_configs, model configurations.
CONFIG_MAX_BYTES = 1 << 20
#: Largest file that programs write. Parsed, it takes at most 20 times as much memory.
MAX_BYTES = 64 << 20
#: Longest line of a log.
LINE_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Rules:
    """Limits of a document, and how its errors are reported."""

    error: type[LlmscaleError]
    """Error raised for any fault."""
    remedy: str = ""
    """Sentence at the end of every message."""
    max_bytes: int = MAX_BYTES
    follow_links: bool = True
    """Accept a symbolic link: not inside a run."""
    not_finite: bool = False
    """Accept NaN and Infinity, which Python writes and JSON lacks."""


def load_json(path: Path, rules: Rules, where: str = "") -> dict[str, object]:
    """Return the JSON object in a file. `where` names the file in messages instead of its path."""
    where = where or str(path)
    return parse_json(_read(path, rules, where), rules, where)


def load_yaml(path: Path, rules: Rules, where: str = "") -> dict[str, object]:
    """Return the mapping in a YAML file; an empty file gives an empty mapping."""
    where = where or str(path)
    return parse_yaml(_read(path, rules, where), rules, where)


def load_toml(path: Path, rules: Rules, where: str = "") -> dict[str, object]:
    """Return the table in a TOML file."""
    where = where or str(path)
    return parse_toml(_read(path, rules, where), rules, where)


@dataclass(frozen=True)
class BadLine:
    """A log line that is not a JSON object: damaged, not UTF-8, too long, or half-written."""

    number: int
    """Line number, from 1."""
    is_torn: bool
    """True for a last line without a newline: its writer died or is still writing."""


def load_json_lines(path: Path, on_bad: Callable[[BadLine], None] | None = None) -> Iterator[dict[str, object]]:
    """Yield the JSON objects of a log, one per line; bad lines are skipped and passed to `on_bad`.

    NaN and Infinity are accepted. Raises OSError, and RefusedFile for anything but a regular file.
    """
    rules = Rules(LlmscaleError, max_bytes=LINE_MAX_BYTES, not_finite=True)
    number = 0
    with open_regular(path) as file:
        while line := file.readline(LINE_MAX_BYTES):
            number += 1
            try:
                yield parse_json(line, rules, "")
            except LlmscaleError:
                if on_bad and not line.isspace():
                    on_bad(BadLine(number, is_torn=not line.endswith(b"\n")))


def parse_json(contents: bytes | str, rules: Rules, where: str) -> dict[str, object]:
    """Return the JSON object in `contents`; bytes are UTF-8. Raises `rules.error`."""
    text = _decode(contents, rules, where, "JSON")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=None if rules.not_finite else _refuse_constant,
        )
    except json.JSONDecodeError as error:
        hint = ""
        if text[error.pos : error.pos + 1] in tuple("/#}],'"):
            hint = ". (JSON has no comments and no comma after the last entry.)"
        place = f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
        raise _fault(rules, f"{where} is not JSON: {place}{hint}") from None
    except RecursionError:
        raise _fault(rules, f"{where} nests objects and lists too deeply") from None
    except ValueError as error:
        raise _fault(rules, f"{where}: {error}") from None
    return _checked(value, rules, where, "a JSON object")


def parse_yaml(contents: bytes | str, rules: Rules, where: str) -> dict[str, object]:
    """Return the mapping in `contents`: safe YAML without duplicate keys. Raises `rules.error`."""
    import yaml

    text = _decode(contents, rules, where, "valid yaml")
    try:
        value = yaml.load(text, Loader=_strict_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _fault(rules, f"{where} is not valid yaml: {_yaml_problem(error)}") from None
    return {} if value is None else _checked(value, rules, where, "keys and values")


def parse_toml(contents: bytes | str, rules: Rules, where: str) -> dict[str, object]:
    """Return the TOML table in `contents`. Raises `rules.error`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = _decode(contents, rules, where, "valid toml")
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _fault(rules, f"{where} is not valid toml: {' '.join(str(error).split())}") from None
    return _checked(value, rules, where, "keys and values")


def build(kind: type[_T], values: object, rules: Rules, where: str) -> _T:
    """Return a document's values as a dataclass, checked by the types and limits of its fields without conversions.

    Raises `rules.error` with the first wrong entry, its value and the rule.
    """
    from pydantic import ValidationError

    try:
        # As JSON, in which a list is also a tuple.
        instance: _T = _adapter(cast("Hashable", kind)).validate_json(json.dumps(values), strict=True)
        return instance
    except ValidationError as error:
        first = error.errors()[0]
        name = make_visible_line(".".join(map(str, first["loc"]))[:80])
        reason = describe_invalid(name, first, lambda value: repr(value)[:80])
        if first["type"] == "missing":
            reason = f"{name} is missing"
        elif first["type"] == "unexpected_keyword_argument":
            legal = [field.name for field in dataclasses.fields(cast(type, kind))]
            reason = f"unknown key '{name}'.{did_you_mean(name, legal)} Legal: {', '.join(legal)}"
        raise _fault(rules, f"{where}: {reason}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _read(path: Path, rules: Rules, where: str) -> bytes:
    try:
        return read_regular(path, rules.max_bytes, follow_links=rules.follow_links)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        # ValueError: a NUL in the path.
        raise _fault(rules, f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _decode(contents: bytes | str, rules: Rules, where: str, kind: str) -> str:
    if len(contents) > rules.max_bytes:
        raise _fault(rules, f"{where} is larger than the limit of {rules.max_bytes:,} bytes")
    if isinstance(contents, str):
        return contents
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _fault(rules, f"{where} is not {kind}: it is not UTF-8 text (byte {error.start})") from None


def _checked(value: object, rules: Rules, where: str, wanted: str) -> dict[str, object]:
    """Return `value` if it is a mapping, with its keys as text."""
    if not isinstance(value, dict):
        raise _fault(rules, f"{where} must hold {wanted}, not {_describe(value)}")
    return {str(key): entry for key, entry in value.items()}


def _describe(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key '{key}' occurs twice in one object. Keep one of them")
            seen.add(key)
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return " ".join(str(getattr(error, "problem", None) or error).split()) + place


def _fault(rules: Rules, what: str) -> LlmscaleError:
    end = "" if what.endswith((".", ".)")) else "."
    return rules.error(f"{what}{end} {rules.remedy}".rstrip())


def _strict_loader() -> type[yaml.SafeLoader]:
    # Imported here: most commands read no YAML, and its parser takes longest to import.
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Safe YAML without duplicate keys."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{name}' occurs twice; keep one of them", key.start_mark
                    )
                seen.add(name)
            values: dict[object, object] = super().construct_mapping(node, deep=deep)
            return values

    return StrictLoader
