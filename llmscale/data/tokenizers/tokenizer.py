"""The interface of all tokenizers, bytes, and byte-level BPE through tiktoken: GPT-2's or any ranks file.

`<|endoftext|>` inside a document is encoded as characters, not as the token that ends a document, unless special tokens
are to be parsed.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES
from llmscale.untrusted.paths import read_regular, unreadable_as

END_OF_TEXT = "<|endoftext|>"
#: Position after a single newline between two non-space characters. GPT-2's pattern ends a piece before and after the
#: newline, so a cut there does not change tokens.
_BORDER = re.compile(r"(?<=\S\n)(?=\S)")
RANKS_NAME = "ranks.tiktoken"
#: GPT-2's pre-tokenisation (Radford et al. 2019, encoder.py), in the faster equivalent form that tiktoken uses.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


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


class TiktokenTokenizer(Tokenizer):
    """BPE ranks 0..n-1 with GPT-2's pattern; end-of-text is id n."""

    ranks: dict[bytes, int]
    """Token id by the token's bytes."""
    parse_special: bool
    """True if end-of-text written in a text becomes that token."""

    def __init__(self, spec: str, ranks: dict[bytes, int], *, parse_special: bool = False) -> None:
        import tiktoken

        self.spec = spec
        self.vocab_size = len(ranks) + 1
        self.eot_token = len(ranks)
        self.newline_is_a_border = True
        self.ranks = ranks
        self.parse_special = parse_special
        if parse_special:
            self._allowed = {END_OF_TEXT}
        else:
            self._allowed = set[str]()
        ordered = sorted(ranks.items(), key=lambda item: item[1])
        self._ranks_text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered)
        self.sha256 = hashlib.sha256(f"{GPT2_PATTERN}\n{self._ranks_text}".encode()).hexdigest()
        self._encoding = tiktoken.Encoding(
            spec,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.eot_token},
        )

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        allowed = self._allowed
        return [self._encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode(list(ids))
        return text

    def tokens(self) -> dict[int, str]:
        return {rank: write_bytes(token) for token, rank in self.ranks.items()} | {self.eot_token: END_OF_TEXT}

    def save(self, folder: Path) -> str:
        (folder / RANKS_NAME).write_text(self._ranks_text, encoding="ascii")
        return RANKS_NAME


def load_gpt2(*, parse_special: bool = False) -> TiktokenTokenizer:
    """Load GPT-2's 50,257 tokens, which tiktoken downloads once. Raises DataError when they are unavailable."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # the network stack raises many classes
        raise DataError(
            f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}). Pass --tokenizer FILE.tiktoken "
            "(its ranks in tiktoken's format), a tokenizer trained by `llmscale data train-tokenizer`, or bytes."
        ) from None
    return TiktokenTokenizer("gpt2", encoding._mergeable_ranks, parse_special=parse_special)


def load_ranks_file(path: Path, *, parse_special: bool = False) -> TiktokenTokenizer:
    """Load a tiktoken ranks file: one base64 token and its rank per line. Raises DataError naming a wrong line.

    `tiktoken.load` is not used: it reads a cache in the temporary folder even when the file has changed.
    """
    with unreadable_as(DataError, f"The tokenizer {path}"):
        lines = read_regular(path, MAX_BYTES).splitlines()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"{path}, line {number}: expected a base64 token and its rank, not {line[:60]!r}."
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path}: the ranks must be 0 to {max(len(ranks) - 1, 0)}, each once.")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise DataError(f"{path}: every single byte must be a token, but {len(missing)} of 256 are missing.")
    return TiktokenTokenizer(str(path), ranks, parse_special=parse_special)


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
