"""The vocabulary that a model's folder states: tokens by id, read as data. Nothing is built from it and no code run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmscale.data.shards.set_rules import MAX_VOCAB_SIZE
from llmscale.errors import DataError
from llmscale.untrusted.documents import Rules, load_json

JSON_NAME = "tokenizer.json"
#: GPT-2's older form, with its merges in another file; OPT has no other on the Hub.
VOCAB_NAME = "vocab.json"
ADDED_NAME = "added_tokens.json"
#: Of these a folder needs one.
VOCABULARY_NAMES = (JSON_NAME, VOCAB_NAME)


def load_vocabulary(folder: Path) -> tuple[str, dict[int, str]]:
    """The name of the file that states a folder's vocabulary, and its tokens by id; an empty name when there is none.

    Raises DataError when the file is damaged.
    """
    for name, others in ((JSON_NAME, ()), (VOCAB_NAME, (ADDED_NAME,))):
        if (folder / name).is_file():
            record = load_json(folder / name, Rules(DataError))
            if name == JSON_NAME:
                return name, tokens_by_id(record, str(folder / name))
            for other in others:
                if (folder / other).is_file():
                    record |= load_json(folder / other, Rules(DataError))
            return name, _by_id(iter(record.items()), str(folder / name))
    return "", {}


def tokens_by_id(record: dict[str, object], where: str) -> dict[int, str]:
    """Tokens by id of a tokenizer.json that was read: its model's, and those added to them. Raises DataError."""
    model = record.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = record.get("added_tokens") or []
    if not isinstance(vocab, (dict, list)) or not isinstance(added, list):
        raise DataError(f"{where} is not a tokenizer that `tokenizers` can read: model.vocab or added_tokens is wrong.")
    tokens = _by_id(iter(vocab.items()) if isinstance(vocab, dict) else _pieces(vocab, where), where)
    for entry in added:
        if not isinstance(entry, dict):
            raise DataError(f"{where}: an entry of added_tokens is {str(entry)[:40]!r}, not an object.")
        token, content = _checked_id(entry.get("id"), where), entry.get("content")
        if not isinstance(content, str) or not content or tokens.setdefault(token, content) != content:
            raise DataError(
                f"{where}: the id {token} is {tokens.get(token, '')[:40]!r}, and added_tokens say "
                f"{str(content)[:40]!r}. A token needs an id of its own, and a text."
            )
    return tokens


def _pieces(vocab: list[object], where: str) -> Iterator[tuple[object, object]]:
    """A Unigram model lists pieces with their scores, in the order of ids."""
    for place, entry in enumerate(vocab):
        if not isinstance(entry, list) or len(entry) != 2:
            raise DataError(f"{where}: entry {place} of model.vocab is {str(entry)[:40]!r}, not a piece and its score.")
        yield entry[0], place


def _by_id(entries: Iterator[tuple[object, object]], where: str) -> dict[int, str]:
    tokens: dict[int, str] = {}
    for token, number in entries:
        if not isinstance(token, str):
            raise DataError(f"{where}: the vocabulary has {str(token)[:40]!r} where a token's text should be.")
        if tokens.setdefault(_checked_id(number, where), token) != token:
            raise DataError(f"{where}: the tokens {tokens[int(str(number))][:40]!r} and {token[:40]!r} have one id.")
    return tokens


def _checked_id(number: object, where: str) -> int:
    if type(number) is not int or not 0 <= number < MAX_VOCAB_SIZE:
        raise DataError(
            f"{where} has the token id {str(number)[:40]}. Legal: whole numbers below {MAX_VOCAB_SIZE:,}, since tables "
            "have a row for every id."
        )
    return number
