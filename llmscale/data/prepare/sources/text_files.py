"""Text files: one document each; of a long one many."""

from __future__ import annotations

import codecs
import io
import tokenize
from collections.abc import Iterator
from typing import BinaryIO

from llmscale.data.prepare.sources.jsonl import without_lone_surrogates
from llmscale.data.prepare.sources.source import Document, Place, ReadOptions, Record, TokenRules, UndecodableError

#: A longer text file is many documents, of _PIECE_CHARACTERS each.
MAX_TEXT_BYTES = 16 << 20
_PIECE_CHARACTERS = 1 << 20
_CHUNK_BYTES = 1 << 20


def read_text(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """One document; of more than MAX_TEXT_BYTES many, so that a share of them can be kept for validation.

    Places are (documents,), how many were given. Raises UndecodableError for text in another encoding: before anything
    of the file is given, if it is no longer than MAX_TEXT_BYTES.
    """
    (done,) = start or (0,)
    for number, text in enumerate(_read_texts(file, name), start=1):
        if number > done:
            yield Document(text, (number,))


def _read_texts(file: BinaryIO, name: str) -> Iterator[str]:
    head = file.read(_CHUNK_BYTES)
    encoding = "utf-8-sig"
    try:
        if name.lower().endswith(".py"):
            encoding = tokenize.detect_encoding(io.BytesIO(head).readline)[0]
        b" ".decode(encoding)  # refuses codecs that are no text encodings, such as zlib
        decoder = codecs.getincrementaldecoder(encoding)()
        _refuse_zero_bytes(head, name)
        parts, size_bytes = [decoder.decode(head)], len(head)
        while chunk := file.read(_CHUNK_BYTES):
            _refuse_zero_bytes(chunk, name)
            parts.append(decoder.decode(chunk))
            size_bytes += len(chunk)
            if size_bytes > MAX_TEXT_BYTES:
                *done, rest = _cut("".join(parts))
                yield from map(without_lone_surrogates, done)
                parts = [rest]
        parts.append(decoder.decode(b"", final=True))
    except (UnicodeError, SyntaxError, LookupError) as error:
        shown = "UTF-8" if encoding in ("utf-8-sig", "utf-8") else encoding
        raise UndecodableError(f"{name} is not {shown} text: {error}.") from None
    yield without_lone_surrogates("".join(parts))


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most _PIECE_CHARACTERS, each ended behind a line if one ends in its last half."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        border = text.rfind("\n", start + _PIECE_CHARACTERS // 2, start + _PIECE_CHARACTERS)
        end = border + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _refuse_zero_bytes(chunk: bytes, name: str) -> None:
    if b"\0" in chunk:
        raise UndecodableError(f"{name} holds zero bytes: it is binary, or in UTF-16, and no UTF-8 text.")
