from __future__ import annotations

import pytest

from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.errors import DataError
from llmscale.evaluate.scoring import Row, batches_by_length, pair_row, rolling_rows

BYTES = ByteTokenizer()
EOT = BYTES.eot_token


def text_of(row: Row) -> str:
    return bytes(token for token in row.tokens if token != EOT).decode()


def test_a_continuation_is_scored_behind_the_end_of_its_context() -> None:
    row = pair_row(BYTES, 64, "the quick", " fox", "here")
    assert (text_of(row), row.num_scored, len(row)) == ("the quick fox", 4, 12)
    cut = pair_row(BYTES, 6, "the quick", " fox", "here")
    assert (text_of(cut), cut.num_scored, len(cut)) == ("ick fox", 4, 6)


def test_spaces_at_the_contexts_end_belong_to_the_continuation() -> None:
    assert pair_row(BYTES, 64, "the  ", "fox", "here").num_scored == 5


def test_without_a_context_a_document_begins() -> None:
    row = pair_row(BYTES, 64, "", "fox", "here")
    assert (row.tokens[0], text_of(row), row.num_scored) == (EOT, "fox", 3)


@pytest.mark.parametrize(
    ("context", "continuation", "words"),
    [
        ("a", " quick fox", "the continuation has 10 tokens, and the model sees 8"),
        ("a", "", "continuation has no tokens"),
        ("   ", "a", "the context has no tokens"),
    ],
)
def test_what_cannot_be_scored_is_named(context: str, continuation: str, words: str) -> None:
    with pytest.raises(DataError, match=f"^items, line 3: {words}|^items, line 3: .*{words}"):
        pair_row(BYTES, 8, context, continuation, "items, line 3")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 40])
def test_every_token_of_a_text_is_scored_once_with_as_much_before_it_as_fits(length: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(length))
    rows = rolling_rows(BYTES, 8, text)
    assert "".join(text_of(Row(row.tokens[-row.num_scored :], row.num_scored)) for row in rows) == text
    assert rows[0].tokens[0] == EOT
    assert all(len(row) == 8 for row in rows[1:])


def test_batches_hold_rows_of_similar_length_each_once() -> None:
    lengths = [3, 9, 1, 4, 9, 2, 30]
    rows = [Row(tuple(range(length + 1)), 1) for length in lengths]
    batches = batches_by_length(rows, 3, 18)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    assert [[lengths[index] for index in batch] for batch in batches] == [[30], [9, 9], [4, 3, 2], [1]]
    assert batches_by_length([], 3, 18) == []
