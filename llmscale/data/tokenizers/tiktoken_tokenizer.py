"""Byte-level BPE through tiktoken: GPT-2's vocabulary, or any ranks file with GPT-2's pattern."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from pathlib import Path

from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, TokenArray, Tokenizer, write_bytes
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES
from llmscale.untrusted.paths import read_regular, unreadable_as

RANKS_NAME = "ranks.tiktoken"
#: GPT-2's pre-tokenisation (Radford et al. 2019, encoder.py), in the faster equivalent form that tiktoken
#: uses.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


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
        self._allowed = {END_OF_TEXT} if parse_special else set[str]()
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
