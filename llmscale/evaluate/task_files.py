"""Tasks that need nothing but a file: items in JSON lines, each checked, told apart by the format that stands before
the path (`hellaswag=FILE.jsonl`). No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmscale.config.user_paths import TASK_FORMATS, check_task_file
from llmscale.errors import ConfigError, DataError
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import read_regular

_MOST_CHOICES = 64
_MISSING = object()


@dataclass(frozen=True)
class Item:
    """A context, what may follow it, and which of that is right."""

    context: str
    """Empty: the beginning of a document."""
    continuations: tuple[str, ...]
    """Texts that follow the context as they are: choices begin with the space that separates them from it."""
    lengths: tuple[tuple[int, int], ...]
    """Characters and bytes of UTF-8 of each continuation, without the space before a choice."""
    label: int
    """Index of the right continuation."""
    line: int
    """Of the file, from 1."""


@dataclass(frozen=True)
class TaskFile:
    """A task's items."""

    name: str
    """`hellaswag`, else the file's name without its suffix."""
    format: str
    path: Path
    items: tuple[Item, ...]
    sha256: str
    """Of the file."""

    def first(self, limit: int | None) -> TaskFile:
        """With its first items alone; None: all."""
        return replace(self, items=self.items[:limit])

    def where(self, item: Item) -> str:
        """For messages."""
        return f"{self.path}, line {item.line}"


def _hellaswag(record: _Record) -> Item:
    return _choices(record, record.text("ctx"), record.texts("endings"))


def _multiple_choice(record: _Record) -> Item:
    return _choices(record, record.text("context"), record.texts("choices"))


def _likelihood(record: _Record) -> Item:
    text = record.text("continuation")
    return Item(record.text("context"), (text,), (_lengths(text),), 0, record.line)


def _text(record: _Record) -> Item:
    text = record.text("text")
    return Item("", (text,), (_lengths(text),), 0, record.line)


#: By name: the item of a line. llm.c (dev/data/hellaswag.py) reads HellaSwag so, too: the endings behind `ctx`, whose
#: completion they are, without the heading (`activity_label`) that lm-eval puts before it.
FORMATS: Mapping[str, Callable[[_Record], Item]] = dict(
    zip(TASK_FORMATS, (_hellaswag, _multiple_choice, _likelihood, _text), strict=True)
)
_EXAMPLES = {
    "hellaswag": '{"ctx": "A man is on a roof. he", "endings": ["starts ...", ...], "label": 0}',
    "multiple_choice": '{"context": "Question: ...\\nAnswer:", "choices": ["...", ...], "label": 0}',
    "likelihood": '{"context": "...", "continuation": " ..."}',
    "text": '{"text": "..."}',
}


def is_task_file(spec: str) -> bool:
    """Whether `FORMAT=PATH` was written, whatever the format."""
    return "=" in spec


def load_task_files(specs: Iterable[str]) -> tuple[TaskFile, ...]:
    """The tasks `FORMAT=PATH`. Raises ConfigError for an unknown format, a file that is not there or two tasks of one
    name, DataError for an item of another format."""
    tasks: dict[str, TaskFile] = {}
    for spec in specs:
        task = _load(spec)
        if (other := tasks.setdefault(task.name, task)) is not task:
            raise ConfigError(f"{other.path} and {task.path} are both named '{task.name}'. Rename one of the files.")
    return tuple(tasks.values())


def _load(spec: str) -> TaskFile:
    name, _, path_text = check_task_file(spec).partition("=")
    path = Path(path_text)
    try:
        contents = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"task {spec}: {path} cannot be read: {reason}.") from None
    items = tuple(_items(contents, name, path))
    if not items:
        raise DataError(f"{path} holds no item. Write a line for each: {_EXAMPLES[name]}.")
    shown = name if name == "hellaswag" else path.stem
    return TaskFile(shown, name, path, items, hashlib.sha256(contents).hexdigest())


def _items(contents: bytes, format_name: str, path: Path) -> Iterator[Item]:
    for number, line in enumerate(contents.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            rules = Rules(DataError, large_numbers=True)
            yield FORMATS[format_name](_Record(parse_json(line, rules, where), number, where, format_name))


@dataclass(frozen=True)
class _Record:
    """The object of one line. Every method raises DataError for what a field should not be."""

    values: Mapping[str, object]
    line: int
    where: str
    format: str

    def text(self, field: str) -> str:
        value = self._get(field)
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(field, value, "text")
        return self._utf8(field, value)

    def texts(self, field: str) -> tuple[str, ...]:
        value = self._get(field)
        if not isinstance(value, list) or not 2 <= len(value) <= _MOST_CHOICES:
            raise self._wrong(field, value, f"a list of 2 to {_MOST_CHOICES} texts")
        for text in value:
            if not isinstance(text, str) or not text.strip():
                raise self._wrong(field, value, f"a list of texts, and {str(text)[:40]!r} is none")
        return tuple(self._utf8(field, text) for text in value)

    def index(self, field: str, num_choices: int) -> int:
        """HellaSwag has it as a number on GitHub and as text on the Hub."""
        value = self._get(field)
        found = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        if type(found) is not int or not 0 <= found < num_choices:
            raise self._wrong(field, value, f"the index of the right one, from 0 to {num_choices - 1}")
        return found

    def _get(self, field: str) -> object:
        value = self.values.get(field, _MISSING)
        if value is _MISSING:
            raise DataError(
                f'{self.where} has no "{field}", and the format {self.format} needs one: {_EXAMPLES[self.format]}.'
            )
        return value

    def _wrong(self, field: str, value: object, wanted: str) -> DataError:
        return DataError(
            f'{self.where}: "{field}" is {str(value)[:60]!r}, and must be {wanted}. The format {self.format}: '
            f"{_EXAMPLES[self.format]}."
        )

    def _utf8(self, field: str, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f'{self.where}: "{field}" holds half a surrogate pair, which is no text. Mend it.'
            ) from None
        return text


def _choices(record: _Record, context: str, choices: tuple[str, ...]) -> Item:
    return _item(context, choices, record.index("label", len(choices)), record.line)


def _item(context: str, choices: tuple[str, ...], label: int, line: int) -> Item:
    continuations = tuple(f" {choice}" for choice in choices)
    return Item(context, continuations, tuple(_lengths(choice) for choice in choices), label, line)


def _lengths(text: str) -> tuple[int, int]:
    return len(text), len(text.encode())
