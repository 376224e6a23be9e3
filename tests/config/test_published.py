"""What leaves the machine: every key says it, and texts lose folders and secrets."""

from __future__ import annotations

from typing import get_args

import pytest

from llmscale.config.published import last_part, publish_keys, publish_text, publish_texts, publish_words
from llmscale.config.run_config import KEYS, RunConfig
from llmscale.config.run_flags import literal_words
from llmscale.config.run_keys import path_keys
from llmscale.keys import Outside


def may_hold_anything(annotation: object) -> bool:
    """Return whether a type admits text that is not one of a few words."""
    if isinstance(annotation, type):
        return not issubclass(annotation, (bool, int, float, type(None)))
    return not [*literal_words(annotation)] and any(map(may_hold_anything, get_args(annotation)))


def test_every_key_with_text_says_what_leaves_the_machine() -> None:
    for name, field in RunConfig.model_fields.items():
        outside = KEYS[name].outside
        assert outside in get_args(Outside) or not may_hold_anything(field.annotation), name
    assert {name for name in path_keys() if KEYS[name].outside == "value"} == set()


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name].outside in ("name", "private")])
def test_no_key_carries_its_folder(name: str) -> None:
    is_list = "list" in str(RunConfig.model_fields[name].annotation)
    secret = "hellaswag=/home/me/secret/x.jsonl" if name == "eval_tasks" else "/home/me/secret/x.jsonl"
    published = str(publish_keys({name: [secret] if is_list else secret}).get(name))
    words = publish_words([f"--{name.replace('_', '-')}", secret, f"--{name}={secret}", "--plain"])
    assert words[-1] == "--plain"
    for text in (published, " ".join(words)):
        assert "home" not in text and "secret" not in text
        assert ("x.jsonl" in text) == (KEYS[name].outside == "name")


def test_a_key_of_another_version_is_published_if_it_is_a_number() -> None:
    assert publish_keys({"new": "/home/me", "newer": 3, "listed": ["/home/me"], "lr": 1e-3}) == {"newer": 3, "lr": 1e-3}
    assert publish_words(["--new", "/home/me", "--lr", "1e-3", "--no-shuffle"]) == ["--lr", "1e-3", "--no-shuffle"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/home/me/data/set/", "set"),
        ("s3://key:token@bucket/a/set?token=abc#x", "set"),
        ("https://token@host", "host"),
        ("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("hf:owner/set:sample-10BT", "hf:owner/set:sample-10BT"),
        ("hf:/home/me/q", "hf:q"),
        ("~/set@2", "set@2"),
        ("/", "/"),
        (".", "."),
    ],
)
def test_the_last_part_of_a_path_or_url(path: str, part: str) -> None:
    assert last_part(path) == part


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("cannot read /home/me/a b/x.txt: gone", "cannot read a b/x.txt: gone"),
        ("[Errno 2] '/home/me/x'", "[Errno 2] 'x'"),
        ("see https://me:pw@host/a/b?key=1, then ~/runs/x", "see b, then x"),
        ("10,205 tok/s and 3/4 in runs/x; a / b", "10,205 tok/s and 3/4 in runs/x; a / b"),
        ("--run=/home/me/x", "--run=x"),
        ("<b>no memory</b> in </home/me/x>", "<b>no memory</b> in <x>"),
    ],
)
def test_text_keeps_its_words_and_loses_folders(text: str, published: str) -> None:
    assert publish_text(text) == published
    assert publish_texts({"a": [text, 3], "b": None}) == {"a": [published, 3], "b": None}
