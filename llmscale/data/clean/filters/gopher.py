"""Gopher's filters of repetition and quality (Rae et al. 2021, arXiv 2112.11446, table A1 and section A.1.1).

Where the paper leaves something open, datatrove's implementation decides (0.10, `gopher_repetition_filter.py` and
`gopher_quality_filter.py`), which made FineWeb; the names of the rules are its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.findings import Removed, beyond
from llmscale.data.clean.text import Hashes, Text, hash_ngrams, number_words

#: Fractions of paragraphs or lines that are copies of an earlier one, by number and by characters of the text.
MAX_DUPLICATES = 0.30
MAX_DUPLICATE_CHARACTERS = 0.20
#: Characters of the most frequent n-gram, all its occurrences together, over the text's.
MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}
#: Characters within n-grams that occurred before, over the text's.
MAX_DUPLICATE_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
MIN_WORDS, MAX_WORDS = 50, 100_000
MIN_WORD_LENGTH, MAX_WORD_LENGTH = 3, 10
#: `#` or ellipses, per word.
MAX_SYMBOLS = 0.1
MAX_BULLET_LINES, MAX_ELLIPSIS_LINES = 0.9, 0.3
MIN_ALPHABETIC_WORDS = 0.8
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
MIN_STOP_WORDS = 2

_PARAGRAPH_END = re.compile(r"\n{2,}")
_LINE_END = re.compile(r"\n+")
_LETTER_OR_DIGIT = re.compile(r"\w")
_LETTER = re.compile(r"[^\W\d_]")


def count_duplicates(parts: Iterable[str]) -> tuple[int, int]:
    """How many parts are copies of an earlier one, and their characters."""
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
    """Table A1."""
    content, size = text.content, len(text.content)
    for parts, name in (
        (_PARAGRAPH_END.split(content.strip()), "para"),
        (_LINE_END.split(content), "line"),
    ):
        number, characters = count_duplicates(parts)
        if number / len(parts) > MAX_DUPLICATES:
            return Removed(beyond(f"dup_{name}_frac", number / len(parts), MAX_DUPLICATES))
        if characters / size > MAX_DUPLICATE_CHARACTERS:
            return Removed(beyond(f"dup_{name}_char_frac", characters / size, MAX_DUPLICATE_CHARACTERS))
    words = text.words
    numbers = number_words(words)
    ends = np.cumsum([0, *map(len, words)])
    for n, limit in MAX_TOP_NGRAM.items():
        share = _top_ngram_characters(hash_ngrams(numbers, n), ends, n) / size
        if share > limit:
            return Removed(beyond(f"top_{n}_gram", share, limit))
    for n, limit in MAX_DUPLICATE_NGRAMS.items():
        hashes = hash_ngrams(numbers, n)
        later = _later_copies(hashes)
        if not later.any():
            break  # nor do longer ones occur twice
        if _covered_characters(later, ends, n) / size > limit:
            share = _duplicate_characters(hashes.tolist(), ends.tolist(), n) / size
            if share > limit:
                return Removed(beyond(f"duplicated_{n}_n_grams", share, limit))
    return None


def _top_ngram_characters(hashes: Hashes, ends: NDArray[np.int64], n: int) -> int:
    """Characters of the most frequent n-gram with spaces between its words, times its occurrences; of equally frequent
    ones the first."""
    if not len(hashes):
        return 0
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    begin = int(first[counts == counts.max()].min())
    return int(ends[begin + n] - ends[begin] + n - 1) * int(counts.max())


def _later_copies(hashes: Hashes) -> NDArray[np.bool_]:
    """Whether each n-gram occurs further ahead in the text."""
    is_later = np.ones(len(hashes), np.bool_)
    is_later[np.unique(hashes, return_index=True)[1]] = False
    return is_later


def _covered_characters(later: NDArray[np.bool_], ends: NDArray[np.int64], n: int) -> int:
    """Characters of words within any copy: the most that `_duplicate_characters` can find."""
    steps = np.zeros(len(ends), np.int64)
    begins = np.flatnonzero(later)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + n, -1)
    is_covered = np.cumsum(steps)[:-1] > 0
    return int(np.diff(ends)[is_covered].sum())


def _duplicate_characters(hashes: Sequence[int], ends: Sequence[int], n: int) -> int:
    """Characters of words within n-grams that occurred before, each word counted once: behind a copy reading goes on
    with the word after it, and n-grams that were jumped over have not occurred."""
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
    """Section A.1.1."""
    words, content = text.words, text.content
    lengths = [len(word) for word in words if _LETTER_OR_DIGIT.search(word)]
    if len(lengths) < MIN_WORDS:
        return Removed(beyond("gopher_short_doc", len(lengths), MIN_WORDS))
    if len(lengths) > MAX_WORDS:
        return Removed(beyond("gopher_long_doc", len(lengths), MAX_WORDS))
    mean = sum(lengths) / len(lengths)
    if mean < MIN_WORD_LENGTH:
        return Removed(beyond("gopher_below_avg_threshold", mean, MIN_WORD_LENGTH))
    if mean > MAX_WORD_LENGTH:
        return Removed(beyond("gopher_above_avg_threshold", mean, MAX_WORD_LENGTH))
    for rule, count in (
        ("gopher_too_many_hashes", content.count("#")),
        ("gopher_too_many_ellipsis", content.count("...") + content.count("…")),
    ):
        if count / len(words) > MAX_SYMBOLS:
            return Removed(beyond(rule, count / len(words), MAX_SYMBOLS))
    lines = content.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
    if bullets > MAX_BULLET_LINES:
        return Removed(beyond("gopher_too_many_bullets", bullets, MAX_BULLET_LINES))
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
    if ellipses > MAX_ELLIPSIS_LINES:
        return Removed(beyond("gopher_too_many_end_ellipsis", ellipses, MAX_ELLIPSIS_LINES))
    alphabetic = sum(_LETTER.search(word) is not None for word in words) / len(words)
    if alphabetic < MIN_ALPHABETIC_WORDS:
        return Removed(beyond("gopher_below_alpha_threshold", alphabetic, MIN_ALPHABETIC_WORDS))
    stop_words = len(STOP_WORDS.intersection(words))
    if stop_words < MIN_STOP_WORDS:
        return Removed(beyond("gopher_enough_stop_words", stop_words, MIN_STOP_WORDS))
    return None
