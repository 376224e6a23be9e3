"""Filters that judge each document alone: its language, Gopher's, C4's and FineWeb's rules; words and hashes of a text.

- Gopher's repetition and quality: Rae et al. 2021, arXiv 2112.11446, table A1 and section A.1.1. Where the paper leaves
  something open, datatrove's implementation decides (0.10, `gopher_repetition_filter.py`, `gopher_quality_filter.py`).
  It made FineWeb, and the rules have its names.
- C4's lines and pages: Raffel et al. 2020, JMLR 21/140, section 2.2. The order of the rules, those on long words,
  citations and policies, and the marks that end a line follow its code (tensorflow_datasets' `c4_utils.py`) as
  datatrove has it (0.10, `c4_filters.py`). The list of bad words is omitted.
- FineWeb's own: Penedo et al. 2024, arXiv 2406.17557, section 3.6, with the thresholds of the program that made the
  dataset (datatrove 0.10, `fineweb_quality_filter.py`). These are the paper's, except for characters in duplicated
  lines (0.1 in the paper) and newlines per word (absent there).
- Language: py3langid, which is langid.py's model (Lui & Baldwin 2012) retrained. It is BSD-licensed, needs only numpy,
  and its 4.6 MB are in the package. fastText's model is downloaded or share-alike, lingua's is 100 MB and more.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.config.bundled_files import import_extra
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean

Hashes = NDArray[np.uint64]

#: Scripts without spaces between words, of which each character counts as a word: kana, Han.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_SIGN = re.compile(f"[{_SIGNS}]")
#: \w counts the underscore among letters.
_PUNCTUATION = re.compile(r"(?:[^\w\s]|_)+")
#: A character of these scripts that is not a letter, such as U+30FB in `John\u30fbSmith`, is punctuation and separates
#: nothing. After a letter it belongs to it: U+3099 changes the kana before it.
_SPACED = re.compile(rf"(?=\w)[{_SIGNS}](?:(?!\w)[{_SIGNS}])*|(?:[^\s{_SIGNS}]+|(?!\w)[{_SIGNS}])+")
_LETTER = rf"[^\W\d_{_SIGNS}]"
#: Punctuation between spaces at which spaCy's English rules split: `well-known`, `a/b`, `end.Next`.
_CUTS = (
    rf"(?<={_LETTER})(?:,|-+|[\u2013\u2014~])(?={_LETTER})",
    rf"(?<=\w)[:<>=/](?={_LETTER})",
    r"(?<=\d)[+\-*^](?=\d)",
    r"(?<=[a-z])\.(?=[A-Z])",
    r"['\u2019](?:s|m|d|re|ve|ll)\b",
)
_RUN = rf"[^\W{_SIGNS}]+"
#: Nearly the words of spaCy's English tokenizer, for which the thresholds were chosen: punctuation before and after a
#: word is a separate word, punctuation within belongs to the word, clitics are separate words.
_WORD = re.compile(
    rf"[{_SIGNS}]|https?://[^\s{_SIGNS}]*[\w/]|{_RUN}?(?=n['\u2019]t\b)|n['\u2019]t\b|['\u2019](?:s|m|d|re|ve|ll)\b"
    rf"|(?:(?<!\w)[-./@]{{1,3}})?{_RUN}(?:{''.join(f'(?!{cut})' for cut in _CUTS)}[^\w\s]+{_RUN})*|-+|\.{{2,}}|[^\w\s]"
)
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
#: A longer text is judged by three pieces of this length: its beginning, middle and end.
_PIECE_CHARACTERS = 1000
#: Fractions of paragraphs or lines that copy an earlier one, by number and by characters.
MAX_DUPLICATES = 0.30
MAX_DUPLICATE_CHARACTERS = 0.20
#: Characters of all occurrences of the most frequent n-gram, divided by the text's.
MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}
#: Characters within n-grams that occurred before, divided by the text's.
MAX_DUPLICATE_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
MIN_WORDS = 50
MAX_WORDS = 100_000
MIN_WORD_LENGTH = 3
MAX_WORD_LENGTH = 10
#: `#` or ellipses per word.
MAX_SYMBOLS = 0.1
MAX_BULLET_LINES = 0.9
MAX_ELLIPSIS_LINES = 0.3
MIN_ALPHABETIC_WORDS = 0.8
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
MIN_STOP_WORDS = 2
_PARAGRAPH_END = re.compile(r"\n{2,}")
_LINE_END = re.compile(r"\n+")
_LETTER_OR_DIGIT = re.compile(r"\w")
_ANY_LETTER = re.compile(r"[^\W\d_]")
MIN_LINES_WITH_END = 0.12
SHORT_LINE_CHARACTERS = 30
MAX_SHORT_LINES = 0.67
MAX_DUPLICATE_LINE_CHARACTERS = 0.01
MAX_NEWLINES_PER_WORD = 0.3
#: Code points with Unicode's property Sentence_Terminal, in hexadecimal.
_SENTENCE_TERMINALS = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 "
    "17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f "
    "203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 "
    "aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 "
    "110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 "
    "115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 "
    "16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88"
)
MIN_SENTENCES = 5
MIN_LINE_WORDS = 3
MAX_WORD_CHARACTERS = 1000
LINE_ENDS = (".", "?", "!", '"', "'")
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
#: Never starts within a run of marks, which would take time quadratic in its length.
_SENTENCE_END = re.compile(
    r"(?<![.?!\u3002\uff01\uff1f])[.?!\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f]"
)


class Text:
    """One version of a document's text, with its words found once for all steps."""

    def __init__(self, content: str) -> None:
        self.content = content

    @functools.cached_property
    def words(self) -> list[str]:
        """Words and marks of punctuation, for the quality filters."""
        return _WORD.findall(self.content)

    @functools.cached_property
    def word_hashes(self) -> Hashes:
        """Hashes of the `plain_words`, [words]."""
        words = plain_words(self.content)
        return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, words)), np.uint64, len(words))


def plain_words(text: str) -> list[str]:
    """Return words as GPT-3's appendix C has them: between whitespace, without case and punctuation.

    All encodings of an accented letter give the same word; each character of a script without spaces is a word.
    """
    plain = _PUNCTUATION.sub("", _without_case(text))
    if _SIGN.search(plain):
        plain = _SIGN.sub(r" \g<0> ", plain)
    return plain.split()


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return where each of the `plain_words` begins and ends in the text, punctuation included."""
    matches = _SPACED.finditer(text)
    return [match.span() for match in matches if _PUNCTUATION.sub("", _without_case(match.group()))]


def _without_case(text: str) -> str:
    """Fold case. Unlike `lower` it does not depend on neighbours: a final sigma has a form of its own."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", text).casefold()


def hash_ngrams(word_hashes: Hashes, n: int) -> Hashes:
    """Hash every n neighbouring words, [words - n + 1]; return an empty array when there are fewer words."""
    count = len(word_hashes) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for begin in range(n):
        hashes *= HASH_MULTIPLIER
        hashes += word_hashes[begin : begin + count]
    # The low bits of a product depend on low bits alone.
    hashes ^= hashes >> np.uint64(29)
    return hashes


def number_words(words: Sequence[str]) -> Hashes:
    """Hash each word, [words], comparably within one document only, which is far cheaper than a global hash."""
    numbers: dict[str, int] = {}
    hashes = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.uint64, len(words))
    hashes += np.uint64(1)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    return hashes


#: Why text was removed, as written to the files of removed documents: `rule`, then the evidence.
Why = Mapping[str, str | int | float]


def limit_exceeded(rule: str, value: float, limit: float) -> Why:
    """Return why a document is removed whose value is on the wrong side of a limit."""
    return {"rule": rule, "value": round(value, 4), "limit": limit}


@dataclass(frozen=True, slots=True)
class Removed:
    """Removal of a document."""

    why: Why


@dataclass(frozen=True, slots=True)
class Changed:
    """Replacement of a document's text."""

    text: str
    parts: list[tuple[str, Why]]
    """Removed parts, each with the reason."""


@dataclass(frozen=True, slots=True)
class ExactKey:
    """Hash of a document's text without differences in whitespace."""

    key: int


@dataclass(frozen=True, slots=True)
class SketchRow:
    """Row of a document in the `Sketches` of its batch."""

    row: int


@dataclass(frozen=True, slots=True)
class Overlaps:
    """N-grams of evaluation text in a document: (n-gram, first character, character after the last) for each match."""

    matches: list[tuple[int, int, int]]

    @property
    def ngrams(self) -> list[int]:
        """Distinct n-grams."""
        return sorted({ngram for ngram, _, _ in self.matches})


#: A rule, what it measures, and the lowest and highest value that it accepts.
Measure = tuple[str, float, float, float]


def find_beyond(measures: Iterable[Measure]) -> Removed | None:
    """Remove a document by the first measure beyond its limits; later ones are not taken."""
    for rule, value, lowest, highest in measures:
        if not lowest <= value <= highest:
            return Removed(limit_exceeded(rule, value, lowest if value < lowest else highest))
    return None


#: Result of a step for a document; None instead of a finding keeps it.
Finding = Removed | Changed | ExactKey | SketchRow | Overlaps


if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier


def load_identifier() -> LanguageIdentifier:
    """Load the language model. Raises DataError when py3langid is not installed."""
    langid = import_extra("py3langid.langid", "The step language", "data,clean", DataError)
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def check_languages(languages: tuple[str, ...]) -> None:
    """Raise DataError for an unknown language code."""
    known = load_identifier().labels
    for language in languages:
        if language not in known:
            raise DataError(
                f"--languages {language} is not known.{did_you_mean(language, known)} Legal (ISO 639): "
                f"{', '.join(sorted(known))}."
            )


class LanguageFilter:
    """Keep documents in some languages."""

    def __init__(self, languages: tuple[str, ...], min_confidence: float) -> None:
        """Accept a document whose most probable language is among `languages` with at least `min_confidence`."""
        self._languages = frozenset(languages)
        self._min_confidence = min_confidence
        self._identifier = load_identifier()

    def __call__(self, text: Text) -> Removed | None:
        language, confidence = self._identifier.classify(_sample(text.content))
        if language in self._languages and confidence >= self._min_confidence:
            return None
        rule = "language_confidence" if language in self._languages else "language"
        return Removed({"rule": rule, "language": language, "value": round(confidence, 3)})


def _sample(text: str) -> str:
    if len(text) <= 3 * _PIECE_CHARACTERS:
        return text
    middle = (len(text) - _PIECE_CHARACTERS) // 2
    return "\n".join((text[:_PIECE_CHARACTERS], text[middle : middle + _PIECE_CHARACTERS], text[-_PIECE_CHARACTERS:]))


def count_duplicates(parts: Iterable[str]) -> tuple[int, int]:
    """Return how many parts copy an earlier one, and their characters."""
    seen: set[str] = set()
    number = characters = 0
    for part in parts:
        if part in seen:
            number += 1
            characters += len(part)
        else:
            seen.add(part)
    return number, characters


def filter_repetition(text: Text) -> Removed | None:
    """Remove a text that repeats itself, by Gopher's table A1."""
    return find_beyond(_measure_repetition(text))


def _measure_repetition(text: Text) -> Iterator[Measure]:
    content = text.content
    size = len(text.content)
    for parts, name in ((_PARAGRAPH_END.split(content.strip()), "para"), (_LINE_END.split(content), "line")):
        number, characters = count_duplicates(parts)
        yield f"dup_{name}_frac", number / len(parts), 0, MAX_DUPLICATES
        yield f"dup_{name}_char_frac", characters / size, 0, MAX_DUPLICATE_CHARACTERS
    words = text.words
    numbers = number_words(words)
    ends = np.cumsum([0, *map(len, words)])
    for n, limit in MAX_TOP_NGRAM.items():
        yield f"top_{n}_gram", _top_ngram_characters(hash_ngrams(numbers, n), ends, n) / size, 0, limit
    for n, limit in MAX_DUPLICATE_NGRAMS.items():
        hashes = hash_ngrams(numbers, n)
        later = _later_copies(hashes)
        if not later.any():
            return  # then no longer one occurs twice either
        if _covered_characters(later, ends, n) / size > limit:
            characters = _duplicate_characters(hashes.tolist(), ends.tolist(), n)
            yield f"duplicated_{n}_n_grams", characters / size, 0, limit


def _top_ngram_characters(hashes: Hashes, ends: NDArray[np.int64], n: int) -> int:
    """Return the characters of the most frequent n-gram, spaces included, times its occurrences.

    The first of equally frequent n-grams counts.
    """
    if not len(hashes):
        return 0
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    begin = int(first[counts == counts.max()].min())
    return int(ends[begin + n] - ends[begin] + n - 1) * int(counts.max())


def _later_copies(hashes: Hashes) -> NDArray[np.bool_]:
    """Return whether each n-gram occurred earlier in the text, [n-grams]."""
    is_later = np.ones(len(hashes), np.bool_)
    is_later[np.unique(hashes, return_index=True)[1]] = False
    return is_later


def _covered_characters(later: NDArray[np.bool_], ends: NDArray[np.int64], n: int) -> int:
    """Return the characters of words within any copy, an upper bound of `_duplicate_characters`."""
    steps = np.zeros(len(ends), np.int64)
    begins = np.flatnonzero(later)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + n, -1)
    is_covered = np.cumsum(steps)[:-1] > 0
    return int(np.diff(ends)[is_covered].sum())


def _duplicate_characters(hashes: Sequence[int], ends: Sequence[int], n: int) -> int:
    """Return the characters of words within n-grams that occurred before, each word counted once.

    After a copy, reading continues with the word that follows it; n-grams skipped so do not count as occurred.
    """
    seen: set[int] = set()
    place = characters = 0
    while place < len(hashes):
        if hashes[place] in seen:
            characters += ends[place + n] - ends[place]
            place += n
        else:
            seen.add(hashes[place])
            place += 1
    return characters


def filter_quality(text: Text) -> Removed | None:
    """Remove a text of low quality, by Gopher's section A.1.1."""
    return find_beyond(_measure_quality(text))


def _measure_quality(text: Text) -> Iterator[Measure]:
    words = text.words
    content = text.content
    lengths = [len(word) for word in words if _LETTER_OR_DIGIT.search(word)]
    yield "gopher_short_doc", len(lengths), MIN_WORDS, math.inf
    yield "gopher_long_doc", len(lengths), 0, MAX_WORDS
    mean = sum(lengths) / len(lengths)
    yield "gopher_below_avg_threshold", mean, MIN_WORD_LENGTH, math.inf
    yield "gopher_above_avg_threshold", mean, 0, MAX_WORD_LENGTH
    yield "gopher_too_many_hashes", content.count("#") / len(words), 0, MAX_SYMBOLS
    yield "gopher_too_many_ellipsis", (content.count("...") + content.count("…")) / len(words), 0, MAX_SYMBOLS
    lines = content.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    yield "gopher_too_many_bullets", bullets / len(lines), 0, MAX_BULLET_LINES
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    yield "gopher_too_many_end_ellipsis", ellipses / len(lines), 0, MAX_ELLIPSIS_LINES
    alphabetic = sum(_ANY_LETTER.search(word) is not None for word in words)
    yield "gopher_below_alpha_threshold", alphabetic / len(words), MIN_ALPHABETIC_WORDS, math.inf
    yield "gopher_enough_stop_words", len(STOP_WORDS.intersection(words)), MIN_STOP_WORDS, math.inf


def _unfold(ranges: str) -> frozenset[str]:
    bounds = [part.partition("-") for part in ranges.split()]
    return frozenset(chr(code) for low, _, high in bounds for code in range(int(low, 16), int(high or low, 16) + 1))


_LINE_ENDS = _unfold(_SENTENCE_TERMINALS)


def filter_fineweb(text: Text) -> Removed | None:
    """Remove lists, menus and repeated lines, by FineWeb's rules."""
    lines = [line for line in text.content.split("\n") if line.strip()]
    if lines:
        return find_beyond(_measure_lines(text, lines))
    return Removed({"rule": "empty"})


def _measure_lines(text: Text, lines: Sequence[str]) -> Iterator[Measure]:
    ended = sum(line[-1] in _LINE_ENDS for line in lines)
    yield "line_punct_ratio", ended / len(lines), MIN_LINES_WITH_END, math.inf
    short = sum(len(line) <= SHORT_LINE_CHARACTERS for line in lines)
    yield "short_line_ratio", short / len(lines), 0, MAX_SHORT_LINES
    num_newlines = text.content.count("\n")
    duplicates = count_duplicates(lines)[1] / (len(text.content) - num_newlines)
    yield "char_dup_ratio", duplicates, 0, MAX_DUPLICATE_LINE_CHARACTERS
    yield "list_ratio", num_newlines / len(text.words), 0, MAX_NEWLINES_PER_WORD


class C4Filter:
    """Remove lines of a page, or the page, by C4's rules."""

    def __init__(self, *, terminal_punctuation: bool) -> None:
        """With `terminal_punctuation`, a line must end in a mark that ends a sentence.

        C4 required it. FineWeb did not: it removes a third of the text and helps no more than the other rules together
        (Penedo et al. 2024, section 3.5).
        """
        self._needs_end = terminal_punctuation

    def __call__(self, text: Text) -> Removed | Changed | None:
        lines_left: list[str] = []
        parts: list[tuple[str, Why]] = []
        num_sentences = 0
        for raw in text.content.splitlines():
            full = raw.strip()
            line = _CITATION.sub("", full).strip()
            why = self._judge(line)
            if isinstance(why, Removed):
                return why
            if why is None:
                num_sentences += max(1, len(_SENTENCE_END.findall(line)))
                lines_left.append(line)
                if line != full:
                    parts.append((" ".join(_CITATION.findall(full)), {"rule": "citation"}))
            elif full:
                parts.append((full, why))
        if num_sentences < MIN_SENTENCES:
            return Removed(limit_exceeded("too_few_sentences", num_sentences, MIN_SENTENCES))
        content = "\n".join(lines_left).strip()
        if content == text.content:
            return None
        return Changed(content, parts)

    def _judge(self, line: str) -> Why | Removed | None:
        """Return why a line, given without citations, is removed, or the removal of its page."""
        words = line.split()
        longest = max(map(len, words), default=0)
        if longest > MAX_WORD_CHARACTERS:
            return limit_exceeded("too_long_word", longest, MAX_WORD_CHARACTERS)
        if self._needs_end and (not line.endswith(LINE_ENDS) or line.endswith("...")):
            return {"rule": "no_terminal_punc"}
        if len(words) < MIN_LINE_WORDS:
            return limit_exceeded("too_few_words", len(words), MIN_LINE_WORDS)
        lower = line.lower()
        if "lorem ipsum" in lower:
            return Removed({"rule": "lorem_ipsum"})
        if "javascript" in lower:
            return {"rule": "javascript"}
        if "{" in line:
            return Removed({"rule": "curly_bracket"})
        policy = next((phrase for phrase in POLICIES if phrase in lower), None)
        return {"rule": "policy", "phrase": policy} if policy else None
