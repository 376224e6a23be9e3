"""The interface of all tokenizers, and the byte tokenizer, which needs no library.

`<|endoftext|>` inside a document is encoded as characters, not as the token that ends a document, unless special tokens
are to be parsed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@functools.cache
def letters_of_bytes() -> dict[int, str]:
    """Return the printable character for each byte in a tokenizer.json: itself, else the next from U+0100 on (Radford
    et al. 2019, encoder.py, bytes_to_unicode)."""
    letters = {value: chr(value) for value in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (value for value in range(256) if value not in letters)
    return letters | {value: chr(256 + place) for place, value in enumerate(others)}


def write_bytes(token: bytes) -> str:
    """Return a token's bytes in the alphabet of letters_of_bytes."""
    letters = letters_of_bytes()
    return "".join(letters[value] for value in token)


TokenArray = NDArray[np.uint32]

END_OF_TEXT = "<|endoftext|>"
#: Position after a single newline between two non-space characters. GPT-2's pattern ends a piece before and after the
#: newline, so a cut there does not change tokens.
_BORDER = re.compile(r"(?<=\S\n)(?=\S)")


class Tokenizer(ABC):
    """Text to token ids and back. Ids are in [0, vocab_size). `encode` never returns `eot_token` unless the tokenizer
    was loaded to parse special tokens in text."""

    spec: str
    """Argument of `load_tokenizer`."""
    vocab_size: int
    eot_token: int
    bos_tokens: tuple[int, ...] = ()
    """Tokens that the model saw before every document."""
    pad_token: int | None = None
    """The model's padding token, if it has one."""
    sha256: str
    """Hash of the vocabulary and its merges, independent of the location."""
    newline_is_a_border: bool
    """True if no token crosses a single newline between non-spaces, so that text may be cut after it."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the token ids of each text, uint32 arrays, without begin-of-text and end-of-text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def tokens(self) -> dict[int, str]:
        """Return every token by id as in a tokenizer.json: byte-level ones in GPT-2's alphabet."""

    @abstractmethod
    def save(self, folder: Path) -> str:
        """Copy the files needed to load it again into `folder`, which exists.

        Returns the relative path for `load_tokenizer`, empty without files.
        """

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8, and end-of-text as id 256."""

    def __init__(self, *, parse_special: bool = False) -> None:
        self.spec = "bytes"
        self.vocab_size = 257
        self.eot_token = 256
        self.sha256 = hashlib.sha256(b"llmscale bytes, end-of-text 256").hexdigest()
        self.newline_is_a_border = True
        self._parse_special = parse_special

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> TokenArray:
        if self._parse_special and END_OF_TEXT in text:
            first, *others = (self._encode(part) for part in text.split(END_OF_TEXT))
            eot = np.array([self.eot_token], np.uint32)
            return np.concatenate([first, *(array for part in others for array in (eot, part))])
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        pending = bytearray()
        for token in ids:
            if token == self.eot_token:
                parts += [pending.decode(errors="replace"), END_OF_TEXT]
                pending.clear()
            else:
                pending.append(token)
        return "".join(parts) + pending.decode(errors="replace")

    def tokens(self) -> dict[int, str]:
        return letters_of_bytes() | {self.eot_token: END_OF_TEXT}

    def save(self, folder: Path) -> str:
        return ""


def cut_text(text: str, limit: int) -> Iterator[str]:
    """Yield consecutive pieces of `text`, each ending at the first border after `limit` characters. No token of a
    GPT-2-like tokenizer crosses a border, so pieces can be encoded in parallel."""
    start = 0
    while len(text) - start > limit:
        border = _BORDER.search(text, start + limit)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]
