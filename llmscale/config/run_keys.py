"""Read from the declarations of a run's keys: groups, places, conditions, and what leaves the machine. No torch.

Each key declares what others may see of it (`keys.Key.outside`): model cards, reports, trackers and messages leave
secrets and folders out. Free text, such as an error, loses its folders and the secrets of its URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.command_line import Need
from llmscale.config.run_config import IS_PATH, KEYS, RunConfig
from llmscale.config.run_flags import describe_keys
from llmscale.config.schedule import Schedule
from llmscale.config.user_paths import TASK_FORMATS
from llmscale.keys import Breaks, Condition, Outside

#: Classes with resolved values of keys, whose fields have the keys' names, by their places in a Start.
_RESOLVED: Mapping[str, Any] = {
    "resolved.shape": GPTShape,
    "resolved.schedule": Schedule,
    "resolved.plan": BatchPlan,
    "resolved.plan.ranks": ParallelLayout,
}
#: hf:OWNER/NAME, as the Hub has it, with a revision or a configuration; or hf:FOLDER without a path.
_HUB_NAME = re.compile(r"hf:[\w-][\w.-]*(/[\w-][\w.-]*)?([@:][\w.-]+)?", re.ASCII)
_URL = re.compile(r"[A-Za-z][\w+.-]{0,30}://[^\s'\"`,;)<>]+")
#: Folders of an absolute path, but not parts of a relative one or a closing tag.
_FOLDERS = re.compile(r"(?<![\w./~-])(?!(?<=<)/\w+>)(~[\w.-]*)?/(?:[^\s/'\"`,;:()=]+/)*(?=[^\s/])")


def keys_with(**behaviour: object) -> list[str]:
    """Return the keys that behave so: `keys_with(resume="logged")`."""
    return [name for name, key in KEYS.items() if all(getattr(key, word) == value for word, value in behaviour.items())]


def keys_of_ladder() -> list[str]:
    """Return the keys of which each run of a ladder has its own value, or that change its size or its tokens."""
    own = {name for name, key in KEYS.items() if key.by_ladder or key.begins or key.of_model == "size"}
    return [name for name, key in KEYS.items() if name in own or key.in_place_of in own]


def without_effect_under(flag: str) -> dict[str, object]:
    """Return the keys that may not be given with `flag`, each with the value that it has then."""
    fields = RunConfig.model_fields
    return {
        name: fields[name].get_default(call_default_factory=True) if key.off is None else key.off
        for name, key in KEYS.items()
        if f"not {flag}" in key.needs
    }


def path_keys() -> list[str]:
    """Return the keys whose type says that they name a file or a folder."""

    def names_path(kind: object) -> bool:
        return IS_PATH in getattr(kind, "__metadata__", ()) or any(map(names_path, get_args(kind)))

    return [
        name
        for name, field in RunConfig.model_fields.items()
        if IS_PATH in field.metadata or names_path(field.annotation)
    ]


def place_of(key: str) -> str:
    """Return the place of a key's resolved value in a Start (`keys.value_at`)."""
    places = (place for place, kind in _RESOLVED.items() if key in kind.__dataclass_fields__)
    return KEYS[key].place or f"{next(places, 'config')}.{key}"


def _read_need(name: str, condition: str | Condition) -> Need:
    """Return a condition of a key with its message."""
    if isinstance(condition, Condition):
        return Need(name, *condition)
    is_excluded = condition.startswith("not ")
    other, _, wanted = condition.removeprefix("not ").partition("=")
    first, *others = other.split(" or ")
    flag = f"--{first.replace('_', '-')}"
    if wanted:
        words = f"{flag} {wanted}"
        is_met = lambda run: (getattr(run, first) == wanted) != is_excluded  # noqa: E731
    elif is_excluded:
        words = flag
        is_met = lambda run: getattr(run, first) is None  # noqa: E731
    elif RunConfig.model_fields[first].default is True:
        words = f"--no-{flag.removeprefix('--')}"
        is_excluded = True
        is_met = lambda run: getattr(run, first)  # noqa: E731
    else:
        documented = describe_keys()[first]
        value = documented.metavar.partition("|")[0] or {bool: "", str: "NAME"}.get(documented.kind, "N")
        words = f"{flag} {value}".rstrip()
        is_met = lambda run: any(getattr(run, one) for one in (first, *others))  # noqa: E731
    return Need(name, f"with {words}" if is_excluded else words, is_met)


@cache
def needs() -> tuple[Need, ...]:
    """Return the conditions without which keys have no effect."""
    return tuple(_read_need(name, condition) for name, key in KEYS.items() for condition in key.needs)


#: Places in a Start of what a checkpoint and the run that resumes it must share, by the names of CHANGES_THAT_BREAK.
IDENTITY = {
    key.resume.under or name: key.resume.at or place_of(name)
    for name, key in KEYS.items()
    if isinstance(key.resume, Breaks)
}


# ---------------------------------------------------------------- what leaves the machine


def last_part(path: object) -> str:
    """Return the last part of a path or URL, without a query; hf:OWNER/NAME stays complete."""
    text = str(path)
    if _HUB_NAME.fullmatch(text):
        return text
    if "://" in text:
        return re.split(r"[?#]", text)[0].rstrip("/").rpartition("/")[2].rpartition("@")[2]
    prefix = "hf:" if text.startswith("hf:") else ""
    return prefix + (text.removeprefix(prefix).rstrip("/").rpartition("/")[2] or "/")


def flatten(values: Mapping[str, object], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested mappings by their paths, such as a.b.c; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def publish_text(text: str) -> str:
    """Return text in which each URL and absolute path is its last part."""
    return _FOLDERS.sub("", _URL.sub(lambda url: last_part(url[0]), text))


def publish_texts(value: object) -> object:
    """Return JSON values whose texts, at any depth, are published as `publish_text` has them."""
    if isinstance(value, Mapping):
        return {key: publish_texts(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [publish_texts(inner) for inner in value]
    if isinstance(value, str):
        return publish_text(value)
    return value


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
        if value is None or isinstance(value, (str, list, Mapping)):
            return "private"
        return "value"
    return KEYS[key].outside or "value"


def _publish(outside: Outside, value: object) -> object:
    if outside == "value" or value is None:
        return value
    if isinstance(value, list):
        return [_publish(outside, one) for one in value]
    kind, equals, path = str(value).partition("=")
    if equals and kind in TASK_FORMATS:
        return f"{kind}={last_part(path)}"
    return last_part(value)
