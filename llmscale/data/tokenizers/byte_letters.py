"""How a tokenizer.json writes bytes: GPT-2's alphabet, in which every byte is one character that prints."""

from __future__ import annotations

import functools


@functools.cache
def letters_of_bytes() -> dict[int, str]:
    """The character that stands for each byte: itself where it prints, else the next from U+0100 on (Radford et al.
    2019, encoder.py, bytes_to_unicode)."""
    letters = {value: chr(value) for value in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (value for value in range(256) if value not in letters)
    return letters | {value: chr(256 + place) for place, value in enumerate(others)}


def write_bytes(token: bytes) -> str:
    """A token's bytes in that alphabet."""
    letters = letters_of_bytes()
    return "".join(letters[value] for value in token)
