"""Remove evaluation text from training text as for GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix C).

Common n-grams of 13 words are cut out with 200 characters on either side, which splits the document. Pieces of fewer
than 200 characters are removed, and so is a document that splits into more than 10 pieces, short ones included. N-grams
in more than 10 documents are ignored as phrases or boilerplate.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.filters import Hashes, Overlaps, Text, Why, hash_ngrams, word_spans
from llmscale.data.prepare.sources.source import MAX_DOCUMENT_BYTES, LocalFile, opened, suffix_of
from llmscale.data.shards.compressed import head_of, unpacked
from llmscale.errors import DataError
from llmscale.untrusted.paths import check_regular, unreadable_as

#: Words of an n-gram (Brown et al. 2020, arXiv 2005.14165, appendix C).
NGRAM_WORDS = 13
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
WINDOW_CHARACTERS = 200
MIN_PIECE_CHARACTERS = 200
MAX_PIECES = 10
#: Default of `--max-ngram-documents`: an n-gram in more documents is ignored.
MAX_NGRAM_DOCUMENTS = 10


@dataclass(frozen=True)
class EvaluationNgrams:
    """N-grams of NGRAM_WORDS words, sorted by hash."""

    hashes: Hashes
    items: NDArray[np.uint32]
    """First item that contains each n-gram, [n-grams]."""
    labels: Sequence[str]
    """File and line of each item."""
    num_short: int
    """Items with fewer words, which cannot be searched for."""


def read_evaluation_text(paths: Sequence[Path]) -> EvaluationNgrams:
    """Read the n-grams of all items. Raises DataError for a file that is partly unreadable or has too few words."""
    labels: list[str] = []
    hashes: list[Hashes] = [np.zeros(0, np.uint64)]
    items: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]
    num_short = 0
    for path in paths:
        before = len(labels)
        for where, text in _read_items(path):
            ngrams = np.unique(hash_ngrams(Text(text).word_hashes, NGRAM_WORDS))
            num_short += not len(ngrams)
            if len(ngrams):
                hashes.append(ngrams)
                items.append(np.full(len(ngrams), len(labels), np.uint32))
                labels.append(where)
        if len(labels) == before:
            raise DataError(
                f"--decontaminate {path} has no text of at least {NGRAM_WORDS} words, so there is nothing to look for."
            )
    all_hashes, first = np.unique(np.concatenate(hashes), return_index=True)
    return EvaluationNgrams(all_hashes, np.concatenate(items)[first], labels, num_short)


def _read_items(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each item's location and text.

    An item is all strings of a JSON line, of an entry of a JSON list, or of other JSON; otherwise it is the file.
    """
    with unreadable_as(DataError, f"--decontaminate {path}"):
        check_regular(path, follow_links=True)
    suffix = suffix_of(path)
    file = LocalFile(path, path.parent)
    with opened(file) as raw, unpacked(raw, file.name, file.size_bytes) as contents:
        head = head_of(contents).removeprefix(codecs.BOM_UTF8).lstrip()
        if suffix in _JSONL_SUFFIXES or re.fullmatch(rb"\{.*\}\s*", head.partition(b"\n")[0]):
            yield from _read_lines(contents, str(path))
        elif suffix == ".json" or re.match(rb'\[\s*[{"]|\{\s*"', head):
            yield from _read_json(contents, str(path))
        else:
            yield str(path), _decode(contents.read(MAX_DOCUMENT_BYTES + 1), str(path))


def _read_lines(file: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    number = 0
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        where = f"{name}, line {number}"
        text = _decode(line, where)
        if not text.strip():
            continue
        yield where, "\n".join(_strings(_parse(text, where)))


def _read_json(file: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    value = _parse(_decode(file.read(MAX_DOCUMENT_BYTES + 1), name), name)
    items = enumerate(value, start=1) if isinstance(value, list) else [(0, value)]
    for number, item in items:
        where = f"{name}, entry {number}" if number else name
        yield where, "\n".join(_strings(item))


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"--decontaminate {where} is not JSON: {error}. Correct it, so that no item is missed."
        ) from None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _decode(contents: bytes, where: str) -> str:
    if len(contents) > MAX_DOCUMENT_BYTES:
        raise DataError(f"--decontaminate {where} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB. Give JSON lines.")
    if b"\0" in contents:
        raise DataError(f"--decontaminate {where} contains zero bytes: it is binary. Give JSON lines or text.")
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--decontaminate {where} is not UTF-8 ({error.reason} at byte {error.start}). Convert it."
        ) from None


def find_overlaps(text: Text, hashes: Hashes) -> Overlaps | None:
    """Return the matches of a text with `hashes`, which are sorted, or None."""
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
    """Result for a document with n-grams of evaluation text."""

    pieces: list[str]
    """Text to keep: the original if all its n-grams are ignored, nothing if the document is removed."""
    cuts: list[tuple[str, Why]]
    """Removed text with reasons: the parts, or the document."""


class Decontaminator:
    """Cut evaluation text out of documents."""

    def __init__(self, ngrams: EvaluationNgrams, counts: NDArray[np.uint32], max_documents: int) -> None:
        """Ignore n-grams that `counts` finds in more than `max_documents` documents."""
        self._ngrams = ngrams
        self._is_common = counts > max_documents

    def __call__(self, text: str, overlaps: Overlaps) -> Decontaminated:
        counted = [match for match in overlaps.matches if not self._is_common[match[0]]]
        if not counted:
            return Decontaminated([text], [])
        cuts = _join(counted, len(text))
        pieces = _between(text, [(begin, end) for begin, end, _ in cuts])
        long = [piece for piece in pieces if len(piece) >= MIN_PIECE_CHARACTERS]
        if len(pieces) > MAX_PIECES or not long:
            if len(pieces) > MAX_PIECES:
                rule = "too_many_pieces"
            else:
                rule = "no_piece_is_long_enough"
            why: Why = {"rule": rule, "pieces": len(pieces), **self._describe(text, counted[0])}
            return Decontaminated([], [(text, why)])
        parts: list[tuple[str, Why]] = [
            (text[begin:end], {"rule": "evaluation_ngram", **self._describe(text, match)}) for begin, end, match in cuts
        ]
        parts += [
            (piece, {"rule": "short_piece", "value": len(piece), "limit": MIN_PIECE_CHARACTERS})
            for piece in pieces
            if len(piece) < MIN_PIECE_CHARACTERS
        ]
        return Decontaminated(long, parts)

    def _describe(self, text: str, match: tuple[int, int, int]) -> dict[str, str]:
        ngram, begin, end = match
        return {"ngram": text[begin:end], "evaluation": self._ngrams.labels[self._ngrams.items[ngram]]}


def _join(matches: Sequence[tuple[int, int, int]], num_characters: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """Return ranges to cut, windows included, each with its first match, from matches in the order of the text."""
    cuts: list[tuple[int, int, tuple[int, int, int]]] = []
    for match in matches:
        begin = max(0, match[1] - WINDOW_CHARACTERS)
        end = min(num_characters, match[2] + WINDOW_CHARACTERS)
        if cuts and begin <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(end, cuts[-1][1]), cuts[-1][2])
        else:
            cuts.append((begin, end, match))
    return cuts


def _between(text: str, cuts: Sequence[tuple[int, int]]) -> list[str]:
    """Return the non-empty pieces of text before, between and after the cuts."""
    begins = [0, *(end for _, end in cuts)]
    ends = [*(begin for begin, _ in cuts), len(text)]
    pieces = (text[begin:end].strip() for begin, end in zip(begins, ends, strict=True))
    return [piece for piece in pieces if piece]
