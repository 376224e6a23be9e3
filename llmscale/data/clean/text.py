"""A document as the steps see it: its text, and the words in it, found once for all steps."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

#: Scripts that put no spaces between words, each sign of which counts as one: kana, Han.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_SIGN = re.compile(f"[{_SIGNS}]")
#: With the underscore, which \w counts among letters.
_PUNCTUATION = re.compile(r"(?:[^\w\s]|_)+")
#: A sign that is no letter, such as U+30FB in `John\u30fbSmith`, is punctuation and separates nothing. Behind one that
#: is, it belongs to it: U+3099 makes another kana of it.
_SPACED = re.compile(rf"(?=\w)[{_SIGNS}](?:(?!\w)[{_SIGNS}])*|(?:[^\s{_SIGNS}]+|(?!\w)[{_SIGNS}])+")
_LETTER = rf"[^\W\d_{_SIGNS}]"
#: Punctuation within what stands between spaces, at which spaCy's English rules cut: `well-known`, `a/b`, `end.Next`.
_CUTS = (
    rf"(?<={_LETTER})(?:,|-+|[\u2013\u2014~])(?={_LETTER})",
    rf"(?<=\w)[:<>=/](?={_LETTER})",
    r"(?<=\d)[+\-*^](?=\d)",
    r"(?<=[a-z])\.(?=[A-Z])",
    r"['\u2019](?:s|m|d|re|ve|ll)\b",
)
_RUN = rf"[^\W{_SIGNS}]+"
#: Words as spaCy's English tokenizer has them, nearly, since the thresholds were chosen on its words: marks of
#: punctuation before and behind a word are words of their own, those within belong to it, clitics stand alone.
_WORD = re.compile(
    rf"[{_SIGNS}]|https?://[^\s{_SIGNS}]*[\w/]|{_RUN}?(?=n['\u2019]t\b)|n['\u2019]t\b|['\u2019](?:s|m|d|re|ve|ll)\b"
    rf"|(?:(?<!\w)[-./@]{{1,3}})?{_RUN}(?:{''.join(f'(?!{cut})' for cut in _CUTS)}[^\w\s]+{_RUN})*|-+|\.{{2,}}|[^\w\s]"
)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Text:
    """One version of a document's text."""

    def __init__(self, content: str) -> None:
        self.content = content

    @functools.cached_property
    def words(self) -> list[str]:
        """Words and marks of punctuation, for the quality filters."""
        return _WORD.findall(self.content)

    @functools.cached_property
    def word_hashes(self) -> Hashes:
        """Of every word as GPT-3's appendix C has them: see `plain_words`."""
        words = plain_words(self.content)
        return np.fromiter(map(xxhash.xxh3_64_intdigest, words), np.uint64, len(words))


def plain_words(text: str) -> list[str]:
    """Words between whitespace, without case and punctuation, the same for every way to write a letter with its accent;
    each sign of a script without spaces is a word."""
    plain = _PUNCTUATION.sub("", _without_case(text))
    if _SIGN.search(plain):
        plain = _SIGN.sub(r" \g<0> ", plain)
    return plain.split()


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where each of the `plain_words` begins and ends in the text, punctuation included."""
    matches = _SPACED.finditer(text)
    return [match.span() for match in matches if _PUNCTUATION.sub("", _without_case(match.group()))]


def _without_case(text: str) -> str:
    """Unlike `lower`, whatever stands beside a letter: a sigma ends a word in another form than it stands within."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text).casefold()


def hash_ngrams(word_hashes: Hashes, n: int) -> Hashes:
    """A hash of every n neighbouring words, [words - n + 1]; empty when there are fewer words."""
    count = len(word_hashes) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for begin in range(n):
        hashes *= _MULTIPLIER
        hashes += word_hashes[begin : begin + count]
    # The low bits of a product depend on low bits alone.
    hashes ^= hashes >> np.uint64(29)
    return hashes


def number_words(words: Sequence[str]) -> Hashes:
    """A hash of each word that is good within one document: far cheaper than one that is good everywhere."""
    numbers: dict[str, int] = {}
    found = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.uint64, len(words))
    found += np.uint64(1)
    found *= np.uint64(0xD6E8FEB86659FD93)
    found ^= found >> np.uint64(32)
    found *= np.uint64(0xD6E8FEB86659FD93)
    return found
