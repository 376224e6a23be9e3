"""Files of tokens: nanoGPT's `.bin` (uint16 and nothing else), and those of llm.c, which begin with a header.

llm.c: 256 int32, of which the first three are a magic number, a version and the number of tokens (dev/data/
data_common.py, write_datafile): 20240520, version 1, uint16 for GPT-2; 20240801, version 7, uint32 for Llama 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from llmscale.data.prepare.sources.source import Place, ReadOptions, Record, TokenRules
from llmscale.data.prepare.sources.token_stream import documents_in, need_rules
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError

_HEADER_BYTES = 256 * 4
_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_PIECE_TOKENS = 1 << 20


def read_tokens(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Places are (piece, token). Raises DataError: cut short, tokens of another tokenizer."""
    rules = need_rules(rules, name)
    piece, offset = start or (0, 0)
    head = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    dtype = _DTYPES.get((magic, version)) if len(head) == _HEADER_BYTES else None
    if dtype is None:
        if magic in (20240520, 20240801):
            raise DataError(f"{name} is a file of llm.c's of version {version}, which is not known. Known: 1 and 7.")
        if rules.vocab_size > 1 << 16:
            raise DataError(
                f"{name} has no header of llm.c, so it is read as nanoGPT's uint16, and the tokenizer has "
                f"{rules.vocab_size:,} tokens. Give the tokenizer that it was made with."
            )
        yield from documents_in(_pieces(file, head, "<u2", name, None, piece), offset, rules, name)
    else:
        yield from documents_in(_pieces(file, b"", dtype, name, count, piece), offset, rules, name)


def _pieces(
    file: BinaryIO, head: bytes, dtype: str, name: str, count: int | None, first: int
) -> Iterator[tuple[Place, TokenArray]]:
    """From piece `first` on; `head` was read already. Raises DataError when there are not `count` tokens."""
    piece_bytes = _PIECE_TOKENS * np.dtype(dtype).itemsize
    number = num_tokens = 0
    while data := head + _read(file, piece_bytes - len(head)):
        head = b""
        if len(data) % np.dtype(dtype).itemsize:
            raise DataError(f"{name} is cut short, or no file of tokens: it ends within a token.")
        tokens = np.frombuffer(data, dtype)
        num_tokens += len(tokens)
        if number >= first:
            yield (number,), tokens
        number += 1
    if count is not None and num_tokens != count:
        raise DataError(f"{name} is cut short: {num_tokens:,} tokens, and its header says {count:,}.")


def _read(file: BinaryIO, count: int) -> bytes:
    """So many bytes, fewer at the end only."""
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
