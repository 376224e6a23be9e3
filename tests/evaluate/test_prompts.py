from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.evaluate.prompts import read_prompts


def test_lines_and_objects_are_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("the quick\r\n\n  brown fox\nÄ 😀", encoding="utf-8")
    assert read_prompts(lines) == ["the quick", "  brown fox", "Ä 😀"]
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "a\\nb"}\n{"prompt": "", "id": 1}\n', encoding="utf-8")
    assert read_prompts(objects) == ["a\nb", ""]


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("empty.txt", b"\n\n", "holds no prompt. Write one a line"),
        ("nul.txt", b"a\nb\0c\n", "nul.txt, line 2 holds a NUL character"),
        ("latin.txt", b"ok\n\xe9\xe8\n", "latin.txt, line 2 is not UTF-8 text"),
        ("long.txt", b"x" * (1 << 20) + b"x", "line 1 has 1,048,577 characters; at most 1,048,576 are read"),
        ("list.jsonl", b"[1]\n", "list.jsonl, line 1"),
        ("other.jsonl", b'{"text": "a"}\n', 'other.jsonl, line 1 has no text in "prompt"'),
        ("number.jsonl", b'{"prompt": 3}\n', 'has no text in "prompt"'),
        ("surrogate.jsonl", b'{"prompt": "\\ud800"}\n', "is not UTF-8 text"),
        ("deep.jsonl", b"[" * 100_000, "deep.jsonl, line 1"),
    ],
)
def test_what_is_no_prompt_is_one_clear_line(tmp_path: Path, name: str, contents: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path / name)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "gone", "No such file"), (large, "is larger than")):
        with pytest.raises(ConfigError, match=rf"--prompts {path} cannot be read: {said}"):
            read_prompts(path)
