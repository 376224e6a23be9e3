"""Read tasks from JSON lines (`hellaswag=FILE.jsonl`), encode their items and score the answers. No torch."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmscale.config.user_paths import check_task_file
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import ConfigError, DataError
from llmscale.evaluate.scoring import Row, pair_row, rolling_rows
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import read_regular

if TYPE_CHECKING:
    from llmscale.evaluate.scoring import RowScore


_MOST_CHOICES = 64
_TEXT = "text that UTF-8 can hold"
_SURROGATE = re.compile("[\ud800-\udfff]")
_LLM_C = "llm.c"
_GPT3 = "Brown et al. 2020, table H.1"
#: Relative difference in size up to which models are compared.
_NEAR_FRAC = 0.1


@dataclass(frozen=True)
class Item:
    """A context, its possible continuations, and the right one."""

    context: str
    """Text before the continuation; empty at the beginning of a document."""
    continuations: tuple[str, ...]
    """Texts that follow the context exactly; a choice begins with a space."""
    label: int
    """Index of the right continuation."""
    line: int
    """Line of the file, from 1."""


@dataclass(frozen=True)
class TaskFile:
    """A task file with its items."""

    name: str
    """`hellaswag`, otherwise the file's name without its suffix."""
    format: str
    path: Path
    items: tuple[Item, ...]
    sha256: str
    """SHA-256 of the file."""


class _Format(NamedTuple):
    """Fields of a line with an item, and an example of one."""

    example: str
    context: str = ""
    """Text before the continuations; empty for none."""
    continuation: str = ""
    """The only continuation; empty where `choices` has several, and "label" the index of the right one."""
    choices: str = ""


#: HellaSwag is read as by llm.c (dev/data/hellaswag.py): the endings follow `ctx`, without the heading
#: (`activity_label`) that lm-eval adds.
FORMATS: Mapping[str, _Format] = {
    "hellaswag": _Format(
        '{"ctx": "A man is on a roof. he", "endings": ["starts ...", ...], "label": 0}', "ctx", choices="endings"
    ),
    "multiple_choice": _Format(
        '{"context": "Question: ...\\nAnswer:", "choices": ["...", ...], "label": 0}', "context", choices="choices"
    ),
    "likelihood": _Format('{"context": "...", "continuation": " ..."}', "context", "continuation"),
    "text": _Format('{"text": "..."}', continuation="text"),
}


def load_task_files(specs: Iterable[str]) -> tuple[TaskFile, ...]:
    """Load tasks written as `FORMAT=PATH`.

    Raises ConfigError for an unknown format, a missing file or two tasks of one name; DataError for an item that does
    not have the format.
    """
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
        raise DataError(f"{path} holds no item. Write a line for each: {FORMATS[name].example}.")
    task_name = name if name == "hellaswag" else path.stem
    return TaskFile(task_name, name, path, items, hashlib.sha256(contents).hexdigest())


def _items(contents: bytes, name: str, path: Path) -> Iterator[Item]:
    for number, line in enumerate(contents.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _parse_item(parse_json(line, Rules(DataError), where), name, number, where)


def _parse_item(record: Mapping[str, object], name: str, line: int, where: str) -> Item:
    """Return the item of a line. Raises DataError."""
    format = FORMATS[name]

    def get(field: str, what: str, is_right: Callable[[Any], bool]) -> Any:
        if field not in record:
            raise DataError(f'{where} has no "{field}", and the format {name} needs one: {format.example}.')
        if not is_right(value := record[field]):
            raise DataError(
                f'{where}: "{field}" is {str(value)[:60]!r}, and must be {what}. The format {name}: {format.example}.'
            )
        return value

    if format.context:
        context = get(format.context, _TEXT, _is_text)
    else:
        context = ""
    if format.continuation:
        text = get(format.continuation, _TEXT, _is_text)
        return Item(context, (text,), 0, line)
    most = _MOST_CHOICES
    choices = get(
        format.choices,
        f"a list of 2 to {most} texts",
        lambda value: isinstance(value, list) and 2 <= len(value) <= most and all(map(_is_text, value)),
    )
    # HellaSwag has it as a number on GitHub and as text on the Hub.
    labels = {str(index) for index in range(len(choices))}
    label = get(
        "label",
        f"the index of the right one, from 0 to {len(choices) - 1}",
        lambda value: type(value) in (int, str) and str(value) in labels,
    )
    return Item(context, tuple(f" {one}" for one in choices), int(label), line)


def _is_text(value: object) -> bool:
    """Return whether a value is a text with something in it, without half a surrogate pair."""
    return isinstance(value, str) and bool(value.strip()) and not _SURROGATE.search(value)


@dataclass(frozen=True)
class TaskResult:
    """Result of a task, or of a group of lm-eval's."""

    task: str
    values: dict[str, float]
    num_items: int


@dataclass(frozen=True)
class EncodedTask:
    """A task's items as rows of tokens."""

    file: TaskFile
    rows: tuple[Row, ...]
    """Rows of all items, in order."""
    num_rows: tuple[int, ...]
    """Number of rows per item."""

    def values(self, scores: Sequence[RowScore]) -> dict[str, float]:
        """Compute the task's results from the scores of its rows."""
        items = list(self._items(scores))
        if self.file.format == "text":
            return _text_metrics(items)
        if self.file.format == "likelihood":
            return _likelihood_metrics(items)
        return _choice_metrics(items)

    def _items(self, scores: Sequence[RowScore]) -> Iterator[_Scored]:
        start = 0
        for item, count in zip(self.file.items, self.num_rows, strict=True):
            rows = self.rows[start : start + count]
            yield _Scored(item, rows, scores[start : start + count])
            start += count


@dataclass(frozen=True)
class _Scored:
    item: Item
    rows: Sequence[Row]
    scores: Sequence[RowScore]


def encode_task(file: TaskFile, tokenizer: Tokenizer, seq_len: int) -> EncodedTask:
    """Encode a task's items. Raises DataError, with file and line, for one that the model cannot score."""
    rows: list[Row] = []
    counts = []
    for item in file.items:
        where = f"{file.path}, line {item.line}"
        if file.format == "text":
            of_item = rolling_rows(tokenizer, seq_len, item.continuations[0])
        else:
            of_item = [pair_row(tokenizer, seq_len, item.context, text, where) for text in item.continuations]
        rows += of_item
        counts.append(len(of_item))
    return EncodedTask(file, tuple(rows), tuple(counts))


def _choice_metrics(items: Sequence[_Scored]) -> dict[str, float]:
    """Compute the fractions of items whose right choice is the likeliest; the first of equally likely ones is chosen.

    Likelihoods are compared as they are, per character (acc_norm in lm-eval 0.4), per UTF-8 byte and per token (llm.c).
    """
    per: dict[str, Callable[[_Scored, int], float]] = {
        "acc": lambda scored, index: 1.0,
        # Without the space before a choice.
        "acc_norm": lambda scored, index: len(scored.item.continuations[index]) - 1,
        "acc_bytes": lambda scored, index: len(scored.item.continuations[index].encode()) - 1,
        "acc_tokens": lambda scored, index: scored.rows[index].num_scored,
    }
    return {name: sum(_is_right(scored, length) for scored in items) / len(items) for name, length in per.items()}


def _is_right(scored: _Scored, length: Callable[[_Scored, int], float]) -> bool:
    values = [score.log_likelihood / length(scored, index) for index, score in enumerate(scored.scores)]
    return values.index(max(values)) == scored.item.label


def _likelihood_metrics(items: Sequence[_Scored]) -> dict[str, float]:
    """Compute the fraction of continuations that greedy decoding gives, and their perplexity.

    Perplexity is exp of the mean negative log-likelihood per continuation, which in lm-eval's LAMBADA is one word.
    """
    nats = -math.fsum(scored.scores[0].log_likelihood for scored in items) / len(items)
    if nats < math.log(1e300):
        perplexity = math.exp(nats)
    else:
        perplexity = math.inf
    return {"acc": sum(scored.scores[0].is_greedy for scored in items) / len(items), "perplexity": perplexity}


def _text_metrics(items: Sequence[_Scored]) -> dict[str, float]:
    """Compute bits per UTF-8 byte over all texts, and nats per token."""
    nats = -math.fsum(score.log_likelihood for scored in items for score in scored.scores)
    num_bytes = sum(len(scored.item.continuations[0].encode()) for scored in items)
    num_tokens = sum(row.num_scored for scored in items for row in scored.rows)
    return {"bits_per_byte": nats / num_bytes / math.log(2), "loss": nats / num_tokens}


@dataclass(frozen=True)
class PublishedResult:
    """A published model on HellaSwag's 10,042 validation items, without examples (zero-shot).

    GPT-2: llm.c's completion style, which `llmscale eval --tasks hellaswag=...` follows; 124M and 1558M from the
    heading of dev/data/hellaswag.py, the others (per token only) from dev/vislog.ipynb. GPT-3: Brown et al. 2020, table
    H.1, column "zero-shot"; the paper takes the ending of the highest likelihood per token (section 2.4), from a prompt
    of its own.
    """

    model: str
    num_parameters: float
    values: Mapping[str, float]
    """Values under the names of our own results."""
    source: str


HELLASWAG = (
    PublishedResult("GPT-2 124M", 124_439_808, {"acc": 0.2859, "acc_tokens": 0.2955}, _LLM_C),
    PublishedResult("GPT-2 355M", 354_823_168, {"acc_tokens": 0.375224}, _LLM_C),
    PublishedResult("GPT-2 774M", 774_030_080, {"acc_tokens": 0.431986}, _LLM_C),
    PublishedResult("GPT-2 1558M", 1_557_611_200, {"acc": 0.3842, "acc_tokens": 0.4893}, _LLM_C),
    PublishedResult("GPT-3 125M", 125e6, {"acc_tokens": 0.337}, _GPT3),
    PublishedResult("GPT-3 350M", 350e6, {"acc_tokens": 0.436}, _GPT3),
    PublishedResult("GPT-3 760M", 760e6, {"acc_tokens": 0.510}, _GPT3),
    PublishedResult("GPT-3 1.3B", 1.3e9, {"acc_tokens": 0.547}, _GPT3),
    PublishedResult("GPT-3 2.7B", 2.7e9, {"acc_tokens": 0.628}, _GPT3),
    PublishedResult("GPT-3 6.7B", 6.7e9, {"acc_tokens": 0.674}, _GPT3),
    PublishedResult("GPT-3 13B", 13e9, {"acc_tokens": 0.709}, _GPT3),
    PublishedResult("GPT-3 175B", 175e9, {"acc_tokens": 0.789}, _GPT3),
)


def comparable_results(num_parameters: int) -> list[PublishedResult]:
    """Return the results of models with about as many parameters; empty for most sizes."""
    return [
        result
        for result in HELLASWAG
        if abs(num_parameters - result.num_parameters) <= _NEAR_FRAC * result.num_parameters
    ]
