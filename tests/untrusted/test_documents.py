"""Whatever a file holds, the answer is a value or one line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.untrusted.documents import (
    LINE_MAX_BYTES,
    MAX_DEPTH,
    Rules,
    load_json,
    load_json_lines,
    parse_json,
    parse_toml,
    parse_yaml,
)

RULES = Rules(ConfigError, "Mend it.")
OPEN, CLOSE = b'{"a":', b"}"


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is not JSON"),
        (b"nul", "is not JSON"),
        (b'{"a": "cut', "Unterminated string starting at line 1, column 7"),
        (b'{"a": 1,}', r"not JSON: .* at line 1, column 9\. \(JSON has no comments"),
        (b'{"a": 1} {"b": 2}', "Extra data"),
        (b"\xff\xfe{\0}\0", "not UTF-8"),
        (b'{"a": "\xe9"}', "not UTF-8"),
        (b"[1]", "must hold a JSON object, not a list"),
        (b"null", "not null"),
        (b"true", "not true or false"),
        (b"1", "not a number"),
        (b'"text"', "not a text"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "does not fit a double"),
        (b'{"a": 18446744073709551616}', "does not fit 64"),
        (b'{"a": ' + b"9" * 1_000_000 + b"}", "does not fit 64"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b'{"b": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
        (OPEN * 2000 + b"1" + CLOSE * 2000, "levels deep"),
        (OPEN * (MAX_DEPTH + 1) + b"1" + CLOSE * (MAX_DEPTH + 1), "levels deep"),
        (b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", "levels deep"),
        (b"[" * 5_000_000, "levels deep"),
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
    nested = OPEN * MAX_DEPTH + b"1" + CLOSE * MAX_DEPTH
    assert parse_json(b"\xef\xbb\xbf" + nested, RULES, "x")
    assert parse_json(b'{"a": 18446744073709551615, "b": -9223372036854775808, "c": 1e308}', RULES, "x")["c"] == 1e308
    assert parse_json('{"a": Infinity}', Rules(ConfigError, not_finite=True), "x") == {"a": float("inf")}


def test_large_numbers_where_they_are_accepted() -> None:
    rules = Rules(ConfigError, large_numbers=True)
    read = parse_json('{"a": 1000000000000000019884624838656, "b": 18446744073709551616, "c": -7}', rules, "x")
    assert read == {"a": 1e30, "b": 2.0**64, "c": -7}
    assert parse_json(b'{"a": ' + b"9" * 1_000_000 + b"}", rules, "x") == {"a": float("inf")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "the key 'a' occurs twice; keep one of them at line 2"),
        ("a: {b: 1, b: 2}", "the key 'b' occurs twice"),
        ("a: &x [1]\nb: *x", "aliases .* are not supported"),
        ("a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(30)), "aliases"),
        ("- 1", "must hold keys and values, not a list"),
        ("[" * 5000, "levels deep"),
        ("a: " + "9" * 30, "does not fit 64"),
        ("a: " + "9" * 5000, "not valid yaml"),
        ('!!python/object/apply:os.system ["id"]', "could not determine a constructor"),
        ("a: \x1b[31m", "special characters"),
        ("? [1]\n: 2", "unhashable"),
        ("a: 2001-99-99", "month"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_yaml(text, RULES, "x.yaml")


def test_yaml_that_is_accepted() -> None:
    assert parse_yaml("", RULES, "x") == {}
    assert parse_yaml("a: [1, {b: null}]\n2: x", RULES, "x") == {"a": [1, {"b": None}], "2": "x"}


@pytest.mark.parametrize("text", ["a=1\na=2", "a=" + "[" * 5000, "a=" + "9" * 30, "a=" + "9" * 5000, "a", "a=\x00"])
def test_toml_that_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.toml.*Mend it\.$"):
        parse_toml(text, RULES, "x.toml")


def test_files_that_never_end_or_never_begin(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 101)
    (tmp_path / "link").symlink_to("large")
    began = time.monotonic()
    for path, words in [
        (tmp_path / "pipe", "is a named pipe"),
        (Path("/dev/zero"), "is a device"),
        (tmp_path, "is a folder"),
        (tmp_path / "large", "larger than the limit of 100 bytes"),
        (Path("a\0b"), "null byte"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_json(path, Rules(ConfigError, max_bytes=100))
    with pytest.raises(ConfigError, match="is a symbolic link"):
        load_json(tmp_path / "link", Rules(ConfigError, follow_links=False))
    assert time.monotonic() - began < 100, "a pipe that nobody writes to is never read to its end"


def test_damaged_lines_of_a_log_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [b'{"a": 1}', b"\xff\xfe", b'{"a": 2', b"[3]", b"", OPEN * 2000, b"x" * (3 * LINE_MAX_BYTES), b'{"a": NaN}']
    path.write_bytes(b"\n".join([*lines, b'{"a": 4}']))
    actual = list(load_json_lines(path))
    assert [record["a"] for record in actual if record["a"] == record["a"]] == [1, 4]
    assert len(actual) == 3
