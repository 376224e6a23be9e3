"""Documents in a stream of tokens: what lies between two end-of-text tokens, whatever the pieces it is stored in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from llmscale.data.prepare.sources.source import Document, Place, TokenRules
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError

#: A longer document is several, so that memory stays bounded where no token ends one.
MOST_TOKENS = 1 << 22


def need_rules(rules: TokenRules | None, name: str) -> TokenRules:
    """Raises DataError where only text will do."""
    if rules is None:
        raise DataError(f"{name} holds tokens, and text is needed.")
    return rules


def documents_in(
    pieces: Iterable[tuple[Place, TokenArray]], offset: int, rules: TokenRules, name: str
) -> Iterator[Document]:
    """Documents of consecutive pieces, the first of which is read from token `offset` on. Places are (*piece, offset).

    End-of-text and begin-of-text are taken away, and what is empty then. Raises DataError for a token that the
    tokenizer does not have.
    """
    waiting: list[TokenArray] = []
    place: Place = ()
    for piece, tokens in pieces:
        _check(tokens, rules, name)
        begin, offset = offset, 0
        for end in (np.flatnonzero(tokens[begin:] == rules.eot_token) + begin).tolist():
            place = (*piece, end + 1)
            yield from _document([*waiting, tokens[begin:end]], place, rules)
            waiting, begin = [], end + 1
        waiting.append(tokens[begin:])
        place = (*piece, len(tokens))
        if sum(map(len, waiting)) >= MOST_TOKENS:
            yield from _document(waiting, place, rules)
            waiting = []
    yield from _document(waiting, place, rules)


def _document(parts: list[TokenArray], place: Place, rules: TokenRules) -> Iterator[Document]:
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    begin = len(rules.bos_tokens)
    if begin and tuple(tokens[:begin].tolist()) == rules.bos_tokens:
        tokens = tokens[begin:]
    if len(tokens):
        yield Document(tokens.astype(np.uint32), place)


def _check(tokens: TokenArray, rules: TokenRules, name: str) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < rules.vocab_size:
        wrong = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
        raise DataError(
            f"{name} holds the token {wrong}, and the tokenizer has {rules.vocab_size:,}. Give the tokenizer that it "
            "was made with by --tokenizer."
        )
