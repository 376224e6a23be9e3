"""Whatever a file holds, the answer is a value or one line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.untrusted.documents import (
    LINE_MAX_BYTES,
    Rules,
    build,
    load_json,
    load_json_lines,
    parse_json,
    parse_toml,
    parse_yaml,
)

RULES = Rules(ConfigError, "Mend it.")
#: Each line holds the one above nine times: 353 bytes that would be 10^10 entries.
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + inner] * 9)}]\n" for inner, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is not JSON"),
        (b'{"a": "cut', "Unterminated string starting at line 1, column 7"),
        (b'{"a": 1,}', r"not JSON: .* at line 1, column 9\. \(JSON has no comments"),
        (b'{"a": 1} {"b": 2}', "Extra data"),
        (b"\xff\xfe{\0}\0", "not UTF-8"),
        (b"[1]", "must hold a JSON object, not a list"),
        (b"null", "not null"),
        (b"1", "not a number"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b'{"b": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
        (b"[" * 1_000_000, "nests objects and lists too deeply"),
        (b'{"a": ' * 900 + b"1" + b"}" * 900, "nests objects and lists too deeply"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_json_that_is_refused(contents: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_json(contents, RULES, "x.json")
    assert str(caught.value).startswith("x.json")
    assert str(caught.value).endswith(" Mend it.")
    assert "\n" not in str(caught.value)


def test_json_that_is_accepted() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', RULES, "x") == {"a": 1}
    assert parse_json('{"a": Infinity}', Rules(ConfigError, not_finite=True), "x") == {"a": float("inf")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", r"the key 'a' occurs twice in one object \(keep one\), again at line 2, column 1"),
        ("a: {b: 1, b: 2}", "the key 'b' occurs twice"),
        ("- 1", "must hold keys and values, not a list"),
        ("[" * 5000, "nests objects and lists too deeply"),
        ('!!python/object/apply:os.system ["id"]', "could not determine a constructor"),
        ("a: \x1b[31m", "special characters"),
        ("? [1]\n: 2", "unhashable"),
        ("a: 2001-99-99", "month"),
        (LAUGHS + "steps: *j", r"its aliases \(\*name\) repeat parts to more than"),
        (LAUGHS.replace("[", "[{k: 1}, ") + "<<: *j", "its aliases"),
        ("a: &a [*a]", "within what it names"),
        ("a: &a {b: {c: *a}}", "within what it names"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_yaml(text, RULES, "x.yaml")


def test_yaml_that_is_accepted() -> None:
    assert parse_yaml("a: &a {b: 1}\nc:\n  <<: *a\n  d: 2", RULES, "x") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
    assert parse_yaml("", RULES, "x") == {}
    assert parse_yaml("a: &a [1, {b: null}]\n2: *a", RULES, "x") == {"a": [1, {"b": None}], "2": [1, {"b": None}]}


@pytest.mark.parametrize("text", ["a=1\na=2", "a=" + "[" * 5000, "a"])
def test_toml_that_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.toml.*Mend it\.$"):
        parse_toml(text, RULES, "x.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 101)
    (tmp_path / "link").symlink_to("large")
    for path, words in [
        (tmp_path / "pipe", "is a named pipe"),
        (tmp_path, "is a folder"),
        (tmp_path / "large", "larger than the limit of 100 bytes"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_json(path, Rules(ConfigError, max_bytes=100))
    with pytest.raises(ConfigError, match="is a symbolic link"):
        load_json(tmp_path / "link", Rules(ConfigError, follow_links=False))


def test_damaged_lines_of_a_log_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [b'{"a": 1}', b"\xff\xfe", b'{"a": 2', b"[3]", b"", b"x" * (3 * LINE_MAX_BYTES), b'{"a": NaN}']
    path.write_bytes(b"\n".join([*lines, b'{"a": 4}']))
    actual = list(load_json_lines(path))
    assert [record["a"] for record in actual if record["a"] == record["a"]] == [1, 4]
    assert len(actual) == 3


@dataclass(frozen=True)
class _Entry:
    number: int
    names: tuple[str, ...]
    values: dict[str, object]


def test_a_dataclass_may_hold_the_name_of_a_file_that_is_not_utf8() -> None:
    """Python writes such a byte as half a surrogate pair, which pydantic does not read as JSON."""
    values = {"number": 1, "names": ["b\udcff.txt"], "values": {"data": "d\udcff"}}
    assert build(_Entry, values, RULES, "FILE") == _Entry(1, ("b\udcff.txt",), {"data": "d\udcff"})
    with pytest.raises(ConfigError, match=r"FILE: number = 'x': must be a valid integer.* Mend it\."):
        build(_Entry, {**values, "number": "x"}, RULES, "FILE")


@pytest.mark.parametrize("contents", [b"number: 2020-01-01", b"number: !!set {a}", b"number: {? 2020-01-01 : 1}"])
def test_what_yaml_has_and_json_lacks_is_refused(contents: bytes) -> None:
    with pytest.raises(ConfigError, match=r"FILE holds a value that JSON does not have: .*\. Mend it\."):
        build(_Entry, parse_yaml(contents, RULES, "FILE"), RULES, "FILE")
