"""Files of evaluation text, and the n-grams in them that training text should not have."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.text import Hashes, Text, hash_ngrams
from llmscale.data.prepare.sources.formats import suffix_of
from llmscale.data.prepare.sources.input_files import LocalFile, opened
from llmscale.data.prepare.sources.source import MAX_DOCUMENT_BYTES
from llmscale.data.shards.compressed import head_of, unpacked
from llmscale.errors import DataError
from llmscale.untrusted.paths import check_regular

#: Words of an n-gram (Brown et al. 2020, arXiv 2005.14165, appendix C).
NGRAM_WORDS = 13
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class EvaluationNgrams:
    """All n-grams of NGRAM_WORDS words, sorted by hash."""

    hashes: Hashes
    items: NDArray[np.uint32]
    """Of each n-gram, the first item that has it."""
    labels: Sequence[str]
    """Of each item, its file and line."""
    num_short: int
    """Items of fewer words, which cannot be looked for."""


def read_evaluation_text(paths: Sequence[Path]) -> EvaluationNgrams:
    """Raises DataError for a file that cannot be read as a whole, or that holds nothing to look for."""
    labels: list[str] = []
    hashes: list[Hashes] = [np.zeros(0, np.uint64)]
    items: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]
    num_short = 0
    for path in paths:
        before = len(labels)
        for where, text in _read_items(path):
            found = np.unique(hash_ngrams(Text(text).word_hashes, NGRAM_WORDS))
            num_short += not len(found)
            if len(found):
                hashes.append(found)
                items.append(np.full(len(found), len(labels), np.uint32))
                labels.append(where)
        if len(labels) == before:
            raise DataError(
                f"--decontaminate {path} has no text of at least {NGRAM_WORDS} words, so there is nothing to look for."
            )
    all_hashes, first = np.unique(np.concatenate(hashes), return_index=True)
    return EvaluationNgrams(all_hashes, np.concatenate(items)[first], labels, num_short)


def _read_items(path: Path) -> Iterator[tuple[str, str]]:
    """Where each item stands, and all text in it: of JSON lines every string of a line, whatever its field, of a JSON
    list those of an entry, of other JSON all, else the whole file."""
    try:
        check_regular(path, follow_links=True)
    except OSError as error:
        raise DataError(f"--decontaminate {path} cannot be read: {error.strerror}.") from None
    suffix, file = suffix_of(path), LocalFile(path, path.parent)
    with opened(file) as raw, unpacked(raw, file.name, file.size_bytes) as contents:
        head = head_of(contents).removeprefix(codecs.BOM_UTF8).lstrip()
        if suffix in _JSONL_SUFFIXES or _is_json(head.partition(b"\n")[0]):
            yield from _read_lines(contents, str(path))
        elif suffix == ".json" or re.match(rb'\[\s*[{"]|\{\s*"', head):
            yield from _read_json(contents, str(path))
        else:
            yield str(path), _decode(contents.read(MAX_DOCUMENT_BYTES + 1), str(path))


def _is_json(line: bytes) -> bool:
    """Return whether a line is a JSON object."""
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(line), dict)
    return False


def _read_lines(file: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    number = 0
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        where = f"{name}, line {number}"
        text = _decode(line, where)
        if not text.strip():
            continue
        yield where, _text_of(_parse(text, where), where)


def _read_json(file: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    value = _parse(_decode(file.read(MAX_DOCUMENT_BYTES + 1), name), name)
    items = enumerate(value, start=1) if isinstance(value, list) else [(0, value)]
    for number, item in items:
        where = f"{name}, entry {number}" if number else name
        yield where, _text_of(item, where)


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_json(where, error) from None


def _text_of(value: object, where: str) -> str:
    try:
        return "\n".join(_strings(value))
    except RecursionError as error:
        raise _no_json(where, error) from None


def _no_json(where: str, error: Exception) -> DataError:
    return DataError(f"--decontaminate {where} is not JSON: {error}. Nothing of it may be missed.")


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
        raise DataError(f"--decontaminate {where} holds zero bytes: it is binary. Give JSON lines or text.")
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--decontaminate {where} is not UTF-8 ({error.reason} at byte {error.start}). Convert it."
        ) from None


def save_hashes(ngrams: EvaluationNgrams, path: Path) -> None:
    """For the workers, which map one file into the memory of all. Raises OSError."""
    buffer = io.BytesIO()
    np.save(buffer, ngrams.hashes)
    path.write_bytes(buffer.getvalue())
