"""Evaluation text in training text, as GPT-3 took it out (Brown et al. 2020, arXiv 2005.14165, appendix C).

N-grams of 13 words that both have, and the 200 characters on either side, are cut out; what is left of the document is
split there, pieces of fewer than 200 characters go, and so does a document that falls into more than 10 pieces, short
ones counted. N-grams that stand in more than 10 documents are ignored: phrases, boilerplate.

How many documents have an n-gram is known at the end only, so documents that have any wait in a file until then, and
come last in the output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.evaluation_text import NGRAM_WORDS, EvaluationNgrams
from llmscale.data.clean.findings import Overlaps, Why
from llmscale.data.clean.text import Hashes, Text, hash_ngrams, word_spans

WINDOW_CHARACTERS = 200
MIN_PIECE_CHARACTERS = 200
MAX_PIECES = 10
#: Of documents with an n-gram, beyond which it is ignored, where `--max-ngram-documents` says nothing else.
MAX_NGRAM_DOCUMENTS = 10


def find_overlaps(text: Text, hashes: Hashes) -> Overlaps | None:
    """Where the text has an n-gram of which the hash is among `hashes`, sorted."""
    own = hash_ngrams(text.word_hashes, NGRAM_WORDS)
    if not len(own) or not len(hashes):
        return None
    places = np.searchsorted(hashes, own)
    places[places == len(hashes)] = 0
    hits = np.flatnonzero(hashes[places] == own).tolist()
    if not hits:
        return None
    spans = word_spans(text.content)
    return Overlaps([(int(places[hit]), spans[hit][0], spans[hit + NGRAM_WORDS - 1][1]) for hit in hits])


@dataclass(frozen=True)
class Decontaminated:
    """What became of a document that has n-grams of evaluation text."""

    number: int
    text: str
    """As it was."""
    pieces: list[str]
    """What stays: the whole text where all its n-grams are ignored, nothing where all of it goes."""
    cuts: list[tuple[str, Why]]
    """What was cut out, or everything."""


class Decontaminator:
    """Holds documents back until all have been seen."""

    def __init__(
        self, ngrams: EvaluationNgrams, path: Path, max_documents: int, counts: NDArray[np.uint32] | None = None
    ) -> None:
        """`path` is a file that may grow to the size of the documents that have n-grams. `counts`: in how many
        documents each n-gram is, where that is known already."""
        self._ngrams = ngrams
        self._is_counted = counts is not None
        self._counts = counts if counts is not None else np.zeros(len(ngrams.hashes), np.uint32)
        self._max_documents = max_documents
        self._path = path
        self._file = path.open("w", encoding="utf-8")

    def hold(self, number: int, text: str, overlaps: Overlaps) -> None:
        """Raises OSError."""
        if not self._is_counted:
            self._counts[overlaps.ngrams] += 1
        self._file.write(json.dumps([number, text, overlaps.matches], ensure_ascii=False) + "\n")

    @property
    def num_ignored(self) -> int:
        """N-grams that were found in too many documents."""
        return int((self._counts > self._max_documents).sum())

    def finish(self) -> Iterator[Decontaminated]:
        """Every document that was held, in order. Raises OSError."""
        self._file.close()
        # Not splitlines, which also ends a line at characters of the text.
        with self._path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                number, text, matches = json.loads(line)
                yield self._judge(number, text, matches)
        self._path.unlink()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _judge(self, number: int, text: str, matches: Sequence[tuple[int, int, int]]) -> Decontaminated:
        counted = [match for match in matches if self._counts[match[0]] <= self._max_documents]
        if not counted:
            return Decontaminated(number, text, [text], [])
        cuts = _join(counted, len(text))
        pieces = _between(text, [(begin, end) for begin, end, _ in cuts])
        long = [piece for piece in pieces if len(piece) >= MIN_PIECE_CHARACTERS]
        if len(pieces) > MAX_PIECES or not long:
            rule = "too_many_pieces" if len(pieces) > MAX_PIECES else "no_piece_is_long_enough"
            why: Why = {"rule": rule, "pieces": len(pieces), **self._describe(text, counted[0])}
            return Decontaminated(number, text, [], [(text, why)])
        parts: list[tuple[str, Why]] = [
            (text[begin:end], {"rule": "evaluation_ngram", **self._describe(text, match)}) for begin, end, match in cuts
        ]
        parts += [
            (piece, {"rule": "short_piece", "value": len(piece), "limit": MIN_PIECE_CHARACTERS})
            for piece in pieces
            if len(piece) < MIN_PIECE_CHARACTERS
        ]
        return Decontaminated(number, text, long, parts)

    def _describe(self, text: str, match: tuple[int, int, int]) -> dict[str, str]:
        ngram, begin, end = match
        return {"ngram": text[begin:end], "evaluation": self._ngrams.labels[self._ngrams.items[ngram]]}


def _join(matches: Sequence[tuple[int, int, int]], num_characters: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """Stretches to cut, windows included, each with its first match; matches are in the order of the text."""
    cuts: list[tuple[int, int, tuple[int, int, int]]] = []
    for match in matches:
        begin, end = max(0, match[1] - WINDOW_CHARACTERS), min(num_characters, match[2] + WINDOW_CHARACTERS)
        if cuts and begin <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(end, cuts[-1][1]), cuts[-1][2])
        else:
            cuts.append((begin, end, match))
    return cuts


def _between(text: str, cuts: Sequence[tuple[int, int]]) -> list[str]:
    """What lies before, between and behind stretches, without what is empty."""
    begins, ends = [0, *(end for _, end in cuts)], [*(begin for begin, _ in cuts), len(text)]
    pieces = (text[begin:end].strip() for begin, end in zip(begins, ends, strict=True))
    return [piece for piece in pieces if piece]
