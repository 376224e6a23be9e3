"""A document as it goes through `prepare` once it is tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class TokenisedDocument:
    """A document's tokens with what stands around it, end-of-text last, and what decides where it goes."""

    tokens: Tokens
    num_text_bytes: int
    text_hash: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def cut_at(self, num_tokens: int) -> tuple[TokenisedDocument, TokenisedDocument]:
        """The first tokens, and the others, each with end-of-text behind it; bytes of text in proportion."""
        num_bytes = round(self.num_text_bytes * num_tokens / (len(self.tokens) - 1))
        first = np.append(self.tokens[:num_tokens], self.tokens[-1:])
        return (
            TokenisedDocument(first, num_bytes, self.text_hash),
            TokenisedDocument(self.tokens[num_tokens:], self.num_text_bytes - num_bytes, self.text_hash),
        )
