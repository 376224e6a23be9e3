"""One batch of documents to tokens: what a worker thread does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.batches import Batch, Mark
from llmscale.data.prepare.encoder import Encoder
from llmscale.data.prepare.sources.source import Rejected
from llmscale.data.prepare.tokenised_document import TokenisedDocument, Tokens
from llmscale.data.prepare.train_val_split import hash_text, hash_tokens
from llmscale.data.shards.manifest import TokenDtype
from llmscale.data.tokenizers.byte_letters import letters_of_bytes
from llmscale.data.tokenizers.tokenizer import TokenArray, Tokenizer


@dataclass(frozen=True)
class TokenisedBatch:
    """A batch when it is tokens: its documents one behind the other, each with what stands around it."""

    tokens: Tokens
    """[tokens of all documents]."""
    begins: Sequence[int]
    """Where each document begins in `tokens`, and where the last one ends."""
    num_text_bytes: Sequence[int]
    """Of each document."""
    text_hashes: Sequence[bytes]
    """Of each document; equal for copies."""
    rejected: list[Rejected]
    mark: Mark
    """Where its source was behind it."""

    def tokens_of(self, first: int, end: int) -> Tokens:
        """Of documents first .. end - 1. A small part is a copy, which does not keep the rest in memory."""
        part = self.tokens[self.begins[first] : self.begins[end]]
        return part if 2 * len(part) > len(self.tokens) else part.copy()

    def document(self, number: int) -> TokenisedDocument:
        tokens = self.tokens_of(number, number + 1)
        return TokenisedDocument(tokens, self.num_text_bytes[number], self.text_hashes[number])


class BatchTokeniser:
    """What several threads do at once."""

    def __init__(self, tokenizer: Tokenizer, encoder: Encoder, dtype: TokenDtype) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._dtype = np.dtype(dtype)
        self._before = np.array(tokenizer.bos_tokens, self._dtype)

    def __call__(self, batch: Batch) -> TokenisedBatch:
        texts = [document for document in batch.documents if isinstance(document, str)]
        encoded = iter(self._encoder.encode(texts))
        parts, num_text_bytes, hashes = [], [], []
        for document in batch.documents:
            if isinstance(document, str):
                parts.append(next(encoded))
                num_text_bytes.append(len(document) if document.isascii() else len(document.encode()))
                hashes.append(hash_text(document))
            else:
                parts.append(document)
                num_text_bytes.append(int(self._token_bytes[document].sum()))
                hashes.append(hash_tokens(document))
        tokens, begins = self._join(parts)
        return TokenisedBatch(tokens, begins, num_text_bytes, hashes, batch.rejected, batch.mark)

    def _join(self, parts: Sequence[TokenArray]) -> tuple[Tokens, list[int]]:
        """The documents one behind the other, and where each begins."""
        num_before = len(self._before)
        begins = [0, *itertools.accumulate(num_before + len(part) + 1 for part in parts)]
        whole: Tokens = np.empty(begins[-1], self._dtype)
        for part, begin in zip(parts, begins, strict=False):
            whole[begin + num_before : begin + num_before + len(part)] = part
        edges = np.array(begins)
        whole[edges[1:] - 1] = self._tokenizer.eot_token
        for number, token in enumerate(self._before):
            whole[edges[:-1] + number] = token
        return whole, begins

    @functools.cached_property
    def _token_bytes(self) -> NDArray[np.int64]:
        """Bytes of text that each token stands for, [vocab_size]; of a tokenizer that is not byte-level about that."""
        return bytes_of_tokens(self._tokenizer)


def bytes_of_tokens(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """UTF-8 bytes of each token, [vocab_size]: letters of one that is byte-level."""
    letters = set(letters_of_bytes().values())
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for token, text in tokenizer.tokens().items():
        lengths[token] = len(text) if letters.issuperset(text) else len(text.encode())
    return lengths
