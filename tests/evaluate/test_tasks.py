from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from llmscale.config.presets import get_preset
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.errors import ConfigError, DataError
from llmscale.evaluate.scoring import RowScore
from llmscale.evaluate.tasks import EncodedTask, comparable_results, encode_task, load_task_files

GOOD = {
    "hellaswag": {"ctx": "A man", "endings": ["runs.", "sits."], "label": 1},
    "multiple_choice": {"context": "Who?", "choices": ["me", "you", "they"], "label": "2"},
    "likelihood": {"context": "A", "continuation": "man"},
    "text": {"text": "naïve text"},
}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "items.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("name", GOOD)
def test_every_line_is_an_item(name: str, tmp_path: Path) -> None:
    (task,) = load_task_files([f"{name}={write(tmp_path, GOOD[name], '', {**GOOD[name], 'more': 1})}"])
    assert task.name == ("hellaswag" if name == "hellaswag" else "items")
    assert [item.line for item in task.items] == [1, 3]


def test_continuations_stand_behind_a_space_that_counts_for_no_length(tmp_path: Path) -> None:
    (choice,) = load_task_files([f"hellaswag={write(tmp_path, GOOD['hellaswag'])}"])
    (item,) = choice.items
    assert (item.continuations, item.label) == ((" runs.", " sits."), 1)
    (text,) = load_task_files([f"text={write(tmp_path, GOOD['text'])}"])
    assert text.items[0].continuations == ("naïve text",)


@pytest.mark.parametrize("continuation", [" man", "man", "  two spaces", "\nline"])
def test_a_likelihoods_continuation_is_the_text_that_was_given(continuation: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"context": "A", "continuation": continuation})
    (item,) = load_task_files([f"likelihood={path}"])[0].items
    assert (item.context, item.continuations) == ("A", (continuation,))


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("hellaswag", {"ctx": None}, r'"ctx" is \'None\', and must be text'),
        ("hellaswag", {"endings": ["runs"]}, r'"endings" is .* must be a list of 2 to 64'),
        ("hellaswag", {"endings": ["runs", 3]}, r"must be a list of 2 to 64 texts"),
        ("hellaswag", {"label": 2}, r'"label" is \'2\', and must be the index of the right one, from 0 to 1'),
        ("hellaswag", {"label": True}, r'"label" is \'True\''),
        ("hellaswag", {"ctx": "\ud800"}, r"must be text that UTF-8 can hold"),
        ("multiple_choice", {"context": " "}, r'"context" is \' \''),
        ("text", {"text": ""}, r'"text" is \'\''),
    ],
)
def test_an_item_of_another_format_is_named_by_file_line_and_field(
    name: str, wrong: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path, GOOD[name], {**GOOD[name], **wrong})
    with pytest.raises(DataError, match=rf"{path}, line 2: .*{words}"):
        load_task_files([f"{name}={path}"])


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"text": 1, "text": 2}', "[" * 9999])
def test_a_line_that_is_no_object_is_named(line: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD["text"], line)
    with pytest.raises(DataError, match=f"{path}, line 2"):
        load_task_files([f"text={path}"])


def test_a_file_without_items_and_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(DataError, match=re.escape(f"{path} holds no item")):
        load_task_files([f"text={path}"])
    path = write(tmp_path, {**GOOD["text"], **GOOD["likelihood"]})
    with pytest.raises(ConfigError, match="both named 'items'"):
        load_task_files([f"text={path}", f"likelihood={path}"])


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
    values = one.values([RowScore(-10.0, False), RowScore(-36.0, False)])
    assert values == {"acc": 1.0, "acc_norm": 1.0, "acc_bytes": 0.0, "acc_tokens": 1.0 if 10 / 3 < 36 / 9 else 0.0}


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


def test_a_model_stands_beside_those_of_its_size() -> None:
    shape = get_preset("gpt2-124m").shape(50257, 1024)
    assert [result.model for result in comparable_results(shape.num_parameters)] == ["GPT-2 124M", "GPT-3 125M"]
    assert comparable_results(10_000_000) == []
