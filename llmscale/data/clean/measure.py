"""How much text there is: words, bytes, and tokens where a tokenizer is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmscale.data.prepare.encoder import Encoder, choose_encoder
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer


class Size(NamedTuple):
    """Of a text."""

    words: int
    """Between whitespace."""
    bytes: int
    """Of UTF-8."""
    tokens: int = 0
    """As `data prepare` packs them, with what stands before and behind a document; 0 where nobody counts them."""

    def less(self, other: Size) -> Size:
        """What is left without the other."""
        return Size(self.words - other.words, self.bytes - other.bytes, self.tokens - other.tokens)


@dataclass
class Amount:
    """Of documents, all their sizes together."""

    documents: int = 0
    words: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, documents: int, size: Size) -> None:
        """So many more documents, which together have this size."""
        self.documents += documents
        self.words += size.words
        self.bytes += size.bytes
        self.tokens += size.tokens

    def add_all(self, other: Amount) -> None:
        """Those of another."""
        self.add(other.documents, Size(other.words, other.bytes, other.tokens))


@dataclass(frozen=True)
class TokenizerName:
    """Whose tokens are counted, as `load_tokenizer` takes it."""

    spec: str
    eot_token: str = ""

    def load(self) -> Tokenizer:
        """Raises DataError."""
        return load_tokenizer(self.spec, eot_token=self.eot_token)


class Measure:
    """Sizes of texts. Tokens are those of the encoder that `data prepare` chooses."""

    def __init__(self, tokenizer: TokenizerName | None) -> None:
        """Raises DataError for a tokenizer that cannot be loaded."""
        self._tokenizer = tokenizer.load() if tokenizer else None
        self._encoder: Encoder | None = None

    def __call__(self, texts: Sequence[str]) -> list[Size]:
        """Of each text. Raises DataError for what the tokenizer cannot encode."""
        sizes = [Size(len(text.split()), len(text.encode())) for text in texts]
        if self._tokenizer is None or not texts:
            return sizes
        if self._encoder is None:
            self._encoder, _ = choose_encoder(self._tokenizer, "auto", texts)
        around = len(self._tokenizer.bos_tokens) + 1
        arrays = self._encoder.encode(texts)
        return [size._replace(tokens=len(array) + around) for size, array in zip(sizes, arrays, strict=True)]
