"""Leave secrets and folders out of model cards, reports, trackers and messages. No torch.

Each key declares what others may see of it (`keys.Key.outside`). Free text, such as an error, loses its folders and the
secrets of its URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from llmscale.config.run_config import KEYS
from llmscale.config.user_paths import TASK_FORMATS
from llmscale.keys import Outside

#: hf:OWNER/NAME, as the Hub has it, with a revision or a configuration; or hf:FOLDER without a path.
_HUB_NAME = re.compile(r"hf:[\w-][\w.-]*(/[\w-][\w.-]*)?([@:][\w.-]+)?", re.ASCII)
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"`,;)<>]+")
#: Folders of an absolute path, but not parts of a relative one or a closing tag.
_FOLDERS = re.compile(r"(?<![\w./~-])(?!(?<=<)/\w+>)(~[\w.-]*)?/(?:[^\s/'\"`,;:()=]+/)*(?=[^\s/])")


def last_part(path: object) -> str:
    """Return the last part of a path or URL, without a query; hf:OWNER/NAME stays complete."""
    text = str(path)
    if _HUB_NAME.fullmatch(text):
        return text
    if "://" in text:
        return re.split(r"[?#]", text)[0].rstrip("/").rpartition("/")[2].rpartition("@")[2]
    prefix = "hf:" if text.startswith("hf:") else ""
    return prefix + (text.removeprefix(prefix).rstrip("/").rpartition("/")[2] or "/")


def publish_text(text: str) -> str:
    """Return text in which each URL and absolute path is its last part."""
    return _FOLDERS.sub("", _URL.sub(lambda url: last_part(url[0]), text))


def publish_texts(value: object) -> object:
    """Return JSON values whose texts, at any depth, are published as `publish_text` has them."""
    if isinstance(value, Mapping):
        return {key: publish_texts(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [publish_texts(inner) for inner in value]
    return publish_text(value) if isinstance(value, str) else value


def publish_keys(values: Mapping[str, object]) -> dict[str, object]:
    """Return keys of a run as others may see them, without private ones and texts of unknown keys."""
    return {
        key: _publish(outside, value)
        for key, value in values.items()
        if (outside := _outside_of(key, value)) != "private"
    }


def publish_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line of a run, without private flags and those of an unknown key."""
    published: list[str] = []
    outside: Outside = "private"
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            published += [] if outside == "private" else [str(_publish(outside, word))]
            continue
        key = name.removeprefix("--").replace("-", "_")
        outside = _outside_of(key.removeprefix("no_"), None)
        if outside != "private":
            published.append(f"{name}={_publish(outside, value)}" if equals else name)
    return published


def _outside_of(key: str, value: object) -> Outside:
    if key not in KEYS:
        return "private" if value is None or isinstance(value, (str, list, Mapping)) else "value"
    return KEYS[key].outside or "value"


def _publish(outside: Outside, value: object) -> object:
    if outside == "value" or value is None:
        return value
    if isinstance(value, list):
        return [_publish(outside, one) for one in value]
    kind, equals, path = str(value).partition("=")
    return f"{kind}={last_part(path)}" if equals and kind in TASK_FORMATS else last_part(value)
