"""One batch of documents to tokens: what a worker thread does."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.batches import Batch, Mark
from llmscale.data.prepare.encoder import Encoder
from llmscale.data.prepare.sources.source import Rejected
from llmscale.data.prepare.tokenised_document import TokenisedDocument, Tokens
from llmscale.data.shards.set_rules import TokenDtype
from llmscale.data.tokenizers.byte_letters import letters_of_bytes
from llmscale.data.tokenizers.tokenizer import TokenArray, Tokenizer


@dataclass(frozen=True)
class TokenisedBatch:
    """A batch when it is tokens."""

    documents: list[TokenisedDocument]
    rejected: list[Rejected]
    mark: Mark
    """Where its source was behind it."""


class BatchTokeniser:
    """What several threads do at once."""

    def __init__(self, tokenizer: Tokenizer, encoder: Encoder, dtype: TokenDtype) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._dtype = np.dtype(dtype)
        self._before = np.array(tokenizer.bos_tokens, self._dtype)

    def __call__(self, batch: Batch) -> TokenisedBatch:
        texts = [document for document in batch.documents if isinstance(document, str)]
        contents = [text.encode() for text in texts]
        encoded = iter(zip(contents, self._encoder.encode(texts, contents), strict=True))
        documents = []
        for document in batch.documents:
            if isinstance(document, str):
                content, tokens = next(encoded)
                documents.append(self._surround(tokens, len(content), hashlib.blake2b(content).digest()))
            else:
                digest = hashlib.blake2b(document.astype("<u4").tobytes(), person=b"tokens").digest()
                num_bytes = int(self._token_bytes[document].sum())
                documents.append(self._surround(document, num_bytes, digest))
        return TokenisedBatch(documents, batch.rejected, batch.mark)

    def _surround(self, tokens: TokenArray, num_text_bytes: int, text_hash: bytes) -> TokenisedDocument:
        begin = len(self._before)
        whole: Tokens = np.empty(begin + len(tokens) + 1, self._dtype)
        whole[:begin] = self._before
        whole[begin:-1] = tokens
        whole[-1] = self._tokenizer.eot_token
        return TokenisedDocument(whole, num_text_bytes, text_hash)

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
