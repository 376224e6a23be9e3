from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.evaluate.scoring import RowScore, in_order
from llmscale.evaluate.tasks import EncodedTask, encode_task, load_task_files, show_value


def encoded(folder: Path, name: str, *records: object) -> EncodedTask:
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return encode_task(load_task_files([f"{name}={path}"])[0], ByteTokenizer(), 64)


def test_lengths_are_counted_in_characters_bytes_and_tokens(tmp_path: Path) -> None:
    """Two endings of which another is the likelier by each measure."""
    record = {"ctx": "a", "endings": ["bb", "éééé"], "label": 1}
    task = encoded(tmp_path, "hellaswag", record, {**record, "label": 0})
    assert [row.num_scored for row in task.rows] == [3, 9, 3, 9]
    # Per ending: -10 / 2 characters, 2 bytes, 3 tokens, and -18 / 4 characters, 8 bytes, 9 tokens.
    scores = [RowScore(-10.0, False), RowScore(-18.0, False)] * 2
    assert task.values(scores) == {"acc": 0.5, "acc_norm": 0.5, "acc_bytes": 0.5, "acc_tokens": 0.5}
    one = encoded(tmp_path, "hellaswag", {**record, "label": 0})
    found = one.values([RowScore(-10.0, False), RowScore(-36.0, False)])
    assert found == {"acc": 1.0, "acc_norm": 1.0, "acc_bytes": 0.0, "acc_tokens": 1.0 if 10 / 3 < 36 / 9 else 0.0}


def test_of_equally_likely_choices_the_first_is_taken(tmp_path: Path) -> None:
    task = encoded(tmp_path, "multiple_choice", {"context": "a", "choices": ["bb", "cc"], "label": 0})
    assert set(task.values([RowScore(-1.0, False)] * 2).values()) == {1.0}


def test_a_likelihood_is_right_where_every_token_is_the_likeliest(tmp_path: Path) -> None:
    task = encoded(tmp_path, "likelihood", *[{"context": "a", "continuation": "b"}] * 4)
    scores = [RowScore(-math.log(2), True), RowScore(-math.log(8), False)] * 2
    assert task.values(scores) == pytest.approx({"acc": 0.5, "perplexity": 4.0})


def test_bits_are_of_all_bytes_of_all_texts(tmp_path: Path) -> None:
    task = encoded(tmp_path, "text", {"text": "é" * 40}, {"text": "ab"})
    assert task.num_rows == (2, 1)
    scores = [RowScore(-64 * math.log(2), False), RowScore(-16 * math.log(2), False), RowScore(-2 * math.log(2), True)]
    assert task.values(scores) == pytest.approx({"bits_per_byte": 1.0, "loss": math.log(2)})


def test_scores_come_back_in_the_order_of_their_rows() -> None:
    assert in_order([(1, RowScore(-2.0, True)), (0, RowScore(-1.0, False))])[1].log_likelihood == -2.0


def test_values_for_people() -> None:
    assert [show_value(value) for value in (0.25, 123.456, 2081005.06, math.inf)] == [
        *("0.2500", "123.4560", "2.081e+06", "inf"),
    ]
