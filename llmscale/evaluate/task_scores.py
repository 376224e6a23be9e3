"""What a task's items come to, from the log-likelihoods of their rows. No torch.

Sums are exact before they are rounded (math.fsum), so it does not matter who scored which item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.evaluate.rows import Row, pair_row, rolling_rows
from llmscale.evaluate.task_files import Item, TaskFile

if TYPE_CHECKING:
    from llmscale.evaluate.scoring import RowScore


@dataclass(frozen=True)
class TaskResult:
    """Of one task, or of a group of lm-eval's."""

    task: str
    values: dict[str, float]
    num_items: int


@dataclass(frozen=True)
class EncodedTask:
    """A task in tokens."""

    file: TaskFile
    rows: tuple[Row, ...]
    """Of all items, one after the other."""
    num_rows: tuple[int, ...]
    """Of each item."""

    def values(self, scores: Sequence[RowScore]) -> dict[str, float]:
        """The task's results, from the scores of its rows."""
        items = list(self._items(scores))
        if self.file.format == "text":
            return _of_texts(items)
        return _of_likelihoods(items) if self.file.format == "likelihood" else _of_choices(items)

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
    """Raises DataError, with file and line, for an item that the model cannot score."""
    rows: list[Row] = []
    counts = []
    for item in file.items:
        where = file.where(item)
        if file.format == "text":
            of_item = rolling_rows(tokenizer, seq_len, item.continuations[0])
        else:
            of_item = [pair_row(tokenizer, seq_len, item.context, text, where) for text in item.continuations]
        rows += of_item
        counts.append(len(of_item))
    return EncodedTask(file, tuple(rows), tuple(counts))


def show_value(value: float) -> str:
    """A result for people."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"


def _of_choices(items: Sequence[_Scored]) -> dict[str, float]:
    """Shares of items whose right choice is the likeliest: as it is; per character, which is what lm-eval 0.4 calls
    acc_norm; per byte of UTF-8; and per token, as llm.c has it. Of equally likely ones the first is chosen."""
    per: dict[str, Callable[[_Scored, int], float]] = {
        "acc": lambda scored, index: 1.0,
        "acc_norm": lambda scored, index: scored.item.lengths[index][0],
        "acc_bytes": lambda scored, index: scored.item.lengths[index][1],
        "acc_tokens": lambda scored, index: scored.rows[index].num_scored,
    }
    return {name: sum(_is_right(scored, length) for scored in items) / len(items) for name, length in per.items()}


def _is_right(scored: _Scored, length: Callable[[_Scored, int], float]) -> bool:
    values = [score.log_likelihood / length(scored, index) for index, score in enumerate(scored.scores)]
    return values.index(max(values)) == scored.item.label


def _of_likelihoods(items: Sequence[_Scored]) -> dict[str, float]:
    """The share of continuations whose every token is the likeliest, and exp of the mean negative log-likelihood of a
    continuation (as lm-eval's LAMBADA has it, where it is one word)."""
    mean = math.fsum(scored.scores[0].log_likelihood for scored in items) / len(items)
    return {"acc": sum(scored.scores[0].is_greedy for scored in items) / len(items), "perplexity": _exp(-mean)}


def _of_texts(items: Sequence[_Scored]) -> dict[str, float]:
    """Bits per byte of UTF-8 over all texts, and nats per token."""
    nats = -math.fsum(score.log_likelihood for scored in items for score in scored.scores)
    num_bytes = sum(scored.item.lengths[0][1] for scored in items)
    num_tokens = sum(row.num_scored for scored in items for row in scored.rows)
    return {"bits_per_byte": nats / num_bytes / math.log(2), "loss": nats / num_tokens}


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(1e300) else math.inf
