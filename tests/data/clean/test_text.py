"""Words, and hashes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from llmscale.data.clean.duplicates import find_exact_key
from llmscale.data.clean.filters import Text, hash_ngrams, number_words, plain_words, word_spans
from llmscale.data.prepare.tokenise import hash_text

#: Letters, signs that are letters, signs that are punctuation (U+30A0, U+30FB, U+309B, U+3099) or unassigned, others.
MIXED = st.text("aB\u00e9 \n.-'\u6f22\u30ab\u3042\u30a0\u30fb\u309b\u3099\u3040\u30fc\U0003134e!_1")


@given(st.text() | MIXED)
@example("A\u30fbB")
@example("\u30ab\u3099x \u0391\u03a3\u30ab __a_b__")
def test_spans_are_those_of_the_plain_words(text: str) -> None:
    spans = word_spans(text)
    assert [word for begin, end in spans for word in plain_words(text[begin:end])] == plain_words(text)
    assert len(spans) == len(plain_words(text)) == len(Text(text).word_hashes)


@pytest.mark.parametrize(
    "other",
    ["CAF\u00c9 STRASSE", "cafe\u0301 stra\u00dfe", "_caf\u00e9_, __strasse__"],
    ids=["capitals", "accents apart", "marked"],
)
def test_words_are_the_same_however_they_are_written(other: str) -> None:
    assert plain_words(other) == ["caf\u00e9", "strasse"]


def test_a_sigma_is_one_letter() -> None:
    assert plain_words("\u039b\u039f\u0393\u039f\u03a3") == plain_words("\u03bb\u03bf\u03b3\u03bf\u03c2")


@given(st.text())
def test_every_character_that_is_no_space_is_in_a_word(text: str) -> None:
    assert "".join(Text(text).words) == "".join(text.split())


def test_words_for_quality() -> None:
    words = Text("I don't know; it's well-known, e.g. a/b at 3.14 (1,000). The end... 漢字").words
    assert words == [
        "I",
        "do",
        "n't",
        "know",
        ";",
        "it",
        "'s",
        "well",
        "-",
        "known",
        ",",
        "e.g",
        ".",
        "a",
        "/",
        "b",
        "at",
        "3.14",
        "(",
        "1,000",
        ")",
        ".",
        "The",
        "end",
        "...",
        "漢",
        "字",
    ]


def test_ngram_hashes_know_order_and_place_does_not_matter() -> None:
    hashes = Text("a b c d a b c e c b a").word_hashes
    threes = hash_ngrams(hashes, 3).tolist()
    assert threes[0] == threes[4] and threes[0] != threes[8] and len(set(threes)) == len(threes) - 1
    assert len(hash_ngrams(hashes, 12)) == 0
    assert len(set(number_words(["a", "b", "a"]).tolist())) == 2


@pytest.mark.parametrize("text", ["a", "!", "a!", "'", "a-", "n't", "a.b-", "n'", "\n", "漢", "\x00"])
def test_hostile_text_takes_linear_time(text: str) -> None:
    """With a quadratic pattern this would not end."""
    long = Text(text * 300_000)
    assert "".join(long.words) == long.content.strip()
    assert len(long.word_hashes) == len(plain_words(long.content))


def test_hashes_of_text_are_those_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """xxhash 4 takes no text; version 3 hashed its UTF-8."""
    for name in ("xxh3_64_intdigest", "xxh3_128_digest"):
        hash_bytes = getattr(xxhash, name)

        def only_bytes(data: object, hash_bytes: Callable = hash_bytes) -> object:
            assert not isinstance(data, str), "Strings must be encoded before hashing"
            return hash_bytes(data)

        monkeypatch.setattr(xxhash, name, only_bytes)
    assert find_exact_key(Text("é  x")).key == 8932000399145522037
    assert hash_text("é x").hex() == "8d29a8daf15b4c5013de9343d1d9eecf"
    assert Text("é").word_hashes.tolist() == [xxhash.xxh3_64_intdigest("é".encode())]
