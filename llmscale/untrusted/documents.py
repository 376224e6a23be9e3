"""Parse JSON, YAML and TOML of bounded size into plain values or dataclasses; nothing else in llmscale parses them.

Any content gives a value or a one-line error that names the file: invalid UTF-8, duplicate keys, a list instead of an
object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from llmscale.errors import LlmscaleError
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.untrusted.paths import open_regular, read_regular, unreadable_as
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
#: Most levels of objects and lists in a JSON file that people write.
_MOST_LEVELS = 100
#: Most entries of a YAML file, those of an alias counted wherever it stands: a file within CONFIG_MAX_BYTES has fewer
#: without aliases.
_MOST_ENTRIES = 1 << 20


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
    """Return the JSON object in a file. `where` names the file in messages instead of its path.

    Callers explain a missing file themselves (FileNotFoundError, NotADirectoryError).
    """
    where = where or str(path)
    try:
        contents = read_regular(path, rules.max_bytes, follow_links=rules.follow_links)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        # ValueError: a NUL in the path.
        raise _fault(rules, f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_json(contents, rules, where)


def load_settings(path: Path, rules: Rules, where: str) -> dict[str, object]:
    """Return the entries of a TOML or YAML file, by its suffix. Raises `rules.error` also for a missing file."""
    with unreadable_as(rules.error, where, rules.remedy):
        contents = read_regular(path, rules.max_bytes, follow_links=rules.follow_links)
    return (parse_toml if path.suffix == ".toml" else parse_yaml)(contents, rules, where)


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
    # One for all lines: `json.loads` with a hook makes a new one each time, and a log may have millions.
    decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates)
    number = 0
    with open_regular(path) as file:
        while line := file.readline(LINE_MAX_BYTES):
            number += 1
            value = _decode_flat_line(line, decoder)
            if value is None:
                try:
                    value = parse_json(line, rules, "")
                except LlmscaleError:
                    if on_bad and not line.isspace():
                        on_bad(BadLine(number, is_torn=not line.endswith(b"\n")))
                    continue
            yield value


def _decode_flat_line(line: bytes, decoder: json.JSONDecoder) -> dict[str, object] | None:
    """Return the JSON object in a line; None where `parse_json` must decide: faults, and what may nest deeply."""
    if line.count(b"{") + line.count(b"[") > _MOST_LEVELS:
        return None
    try:
        value = decoder.decode(line.decode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_json(contents: bytes | str, rules: Rules, where: str) -> dict[str, object]:
    """Return the JSON object in `contents`; bytes are UTF-8. Raises `rules.error`."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    constant = None if rules.not_finite else refuse_constant
    text = _decode(contents, rules, where, "JSON")
    with _malformed_as(rules, f"{where} is not JSON", text):
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=constant)
        # Larger documents are written by programs.
        if len(text) <= CONFIG_MAX_BYTES and _is_deep(value):
            raise RecursionError
    return _checked(value, rules, where, "a JSON object")


def parse_yaml(contents: bytes | str, rules: Rules, where: str) -> dict[str, object]:
    """Return the mapping in `contents`: safe YAML without duplicate keys. Raises `rules.error`."""
    # Imported here: most commands read no YAML, and its parser takes longest to import.
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Safe YAML without duplicate keys, and without aliases that multiply a small file to gigabytes."""

        def construct_document(self, node: yaml.Node) -> object:
            if _count_entries(node, {}) > _MOST_ENTRIES:
                raise ValueError(f"its aliases (*name) repeat parts to more than {_MOST_ENTRIES:,} entries. Write less")
            return super().construct_document(node)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys = set[str]()
            for key, _ in node.value:
                if str(key.value) in keys:
                    problem = f"the key '{key.value}' occurs twice in one object (keep one), again"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                keys.add(str(key.value))
            values: dict[object, object] = super().construct_mapping(node, deep=deep)
            return values

    text = _decode(contents, rules, where, "valid yaml")
    with _malformed_as(rules, f"{where} is not valid yaml"):
        try:
            value = yaml.load(text, Loader=StrictLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise ValueError(f"{error.problem}{place}") from None
        except yaml.YAMLError as error:
            raise ValueError(error) from None
    if value is None:
        return {}
    return _checked(value, rules, where, "keys and values")


def _count_entries(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return the entries below a node of YAML, those of an alias as often as it stands.

    `counted` has the nodes seen so far by their ids. Raises ValueError for a node within itself.
    """
    if id(node) in counted:
        if not counted[id(node)]:
            raise ValueError("an alias (*name) stands within what it names. Write the value out")
        return counted[id(node)]
    counted[id(node)] = 0
    total = 1
    if isinstance(node.value, list):
        for entry in node.value:
            for part in entry if isinstance(entry, tuple) else (entry,):
                total += _count_entries(part, counted)
    counted[id(node)] = total
    return total


def parse_toml(contents: bytes | str, rules: Rules, where: str) -> dict[str, object]:
    """Return the TOML table in `contents`. Raises `rules.error`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = _decode(contents, rules, where, "valid toml")
    with _malformed_as(rules, f"{where} is not valid toml"):
        return tomllib.loads(text)


def build(kind: type[_T], values: object, rules: Rules, where: str) -> _T:
    """Return a document's values as a dataclass, checked by the types and limits of its fields without conversions.

    (Values with half a surrogate pair, which pydantic does not read as JSON, may have numbers converted.)
    Raises `rules.error` with the first wrong entry, its value and the rule.
    """
    from pydantic import ValidationError

    adapter: TypeAdapter[_T] = _adapter(cast("Hashable", kind))
    try:
        text = json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:  # YAML has dates, sets, and lists that hold themselves
        raise _fault(rules, f"{where} holds a value that JSON does not have: {error}") from None
    try:
        try:
            # As JSON, in which a list is also a tuple.
            return adapter.validate_json(text, strict=True)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise
            # Half a surrogate pair, such as Python has for a byte of a path that is not UTF-8.
            return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = make_visible_line(".".join(map(str, first["loc"]))[:80])
        reason = describe_invalid(name, first)
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


@contextmanager
def _malformed_as(rules: Rules, what: str, json_text: str = "") -> Iterator[None]:
    """Raise `rules.error`, which begins with `what`, in place of a parser's error."""
    try:
        yield
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
        if json_text[error.pos : error.pos + 1] in tuple("/#}],'"):
            reason += ". (JSON has no comments and no comma after the last entry.)"
        raise _fault(rules, f"{what}: {reason}") from None
    except RecursionError:
        raise _fault(rules, f"{what}: it nests objects and lists too deeply") from None
    except ValueError as error:
        raise _fault(rules, f"{what}: {' '.join(str(error).split())}") from None


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


def _is_deep(value: object) -> bool:
    """Return whether a value nests more than code can follow that calls itself for each level."""
    level: list[dict | list] = [[value]]
    num_levels = 0
    while level:
        if num_levels > _MOST_LEVELS:
            return True
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, (dict, list))]
        num_levels += 1
    return False


def _describe(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    if value is None:
        return "null"
    return kinds.get(type(value), f"a {type(value).__name__}")


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return the entries of an object. Raises ValueError for a key that occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key '{twice}' occurs twice in one object. Keep one of them")
    return values


def _fault(rules: Rules, what: str) -> LlmscaleError:
    end = "" if what.endswith((".", ".)")) else "."
    return rules.error(f"{what}{end} {rules.remedy}".rstrip())
