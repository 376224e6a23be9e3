"""Which tokens a model has at the end and at the beginning of a document, from what its files say."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.data.tokenizers.model_files import CONFIG_NAME, JSON_NAME, ModelFiles
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT
from llmscale.errors import DataError, did_you_mean

_MAP_NAME = "special_tokens_map.json"


@dataclass(frozen=True)
class EndOfText:
    """The token that ends a document."""

    token: int
    origin: str
    """What says so, for people."""


def find_end_of_text(files: ModelFiles, tokens: dict[int, str], asked: str = "") -> EndOfText:
    """The end-of-text token among `tokens` (by id): `asked`, else what the model's files agree on.

    tokenizer_config.json (else special_tokens_map.json) names it by text, config.json and generation_config.json by
    one or several ids; where none of them does, it is `<|endoftext|>`. Of several different ones, those that the chat
    template writes end a turn, not a text: an instructed Llama 3 has <|eot_id|> and <|end_of_text|>. Raises DataError
    when not exactly one is left.
    """
    ids = {text: token for token, text in tokens.items()}
    if asked:
        if asked not in ids:
            hint = did_you_mean(asked, _marked(ids))
            raise DataError(f"--eot-token '{asked[:80]}' is no token of {files.name}.{hint} {_examples(ids)}")
        return EndOfText(ids[asked], "--eot-token")
    named_by: dict[int, str] = {}
    for token, origin in _named(files, ids):
        if token not in tokens:
            raise DataError(
                f"{files.name}: {origin} names the token {token}, and {JSON_NAME} has no such token. Name the "
                "end-of-text token with --eot-token."
            )
        named_by[token] = f"{named_by[token]} and {origin}" if token in named_by else origin
    if not named_by and END_OF_TEXT in ids:
        return EndOfText(ids[END_OF_TEXT], f"no file names one, and {JSON_NAME} has it")
    if not named_by:
        raise DataError(
            f"{files.name} has no end-of-text token: no file names an eos_token, and '{END_OF_TEXT}' is not in its "
            f"vocabulary. Name one that is with --eot-token. {_examples(ids)}"
        )
    left = named_by
    if len(named_by) > 1:
        template = files.chat_template()
        left = {token: origin for token, origin in named_by.items() if tokens[token] not in template}
    if len(left) != 1:
        choice = "; ".join(f"'{tokens[token]}' ({origin})" for token, origin in named_by.items())
        raise DataError(f"{files.name} names several end-of-text tokens: {choice}. Choose one with --eot-token.")
    [(token, origin)] = left.items()
    others = "".join(f"; '{tokens[other]}' ends a turn of its chats" for other in named_by if other != token)
    return EndOfText(token, origin + others)


def _marked(ids: dict[str, int]) -> list[str]:
    return [text for text in ids if text.startswith("<") and text.endswith(">") and len(text) > 2]


def _examples(ids: dict[str, int]) -> str:
    return f"It has, for example, {', '.join(_marked(ids)[:6]) or 'no token in angle brackets'}."


def _named(files: ModelFiles, ids: dict[str, int]) -> list[tuple[int, str]]:
    """Ids that the files call end-of-text, each with what says so. Raises DataError."""
    found: list[tuple[int, str]] = []
    for name in (CONFIG_NAME, _MAP_NAME):
        text = token_text(files, name, "eos_token")
        if not text:
            continue
        if text not in ids:
            raise DataError(
                f"{files.name}/{JSON_NAME} has no end-of-text token: '{text[:80]}' is not in its vocabulary, and "
                f"eos_token of {name} says so. Name one that is with --eot-token."
            )
        found.append((ids[text], f"eos_token of {name}"))
        break
    for name in ("config.json", "generation_config.json"):
        named = files.record(name).get("eos_token_id")
        for token in named if isinstance(named, list) else [named]:
            if token is None:
                continue
            if type(token) is not int:
                raise DataError(f"{files.name}/{name}: eos_token_id is {str(token)[:40]!r}, not a token's number.")
            found.append((token, f"eos_token_id of {name}"))
    return found


def token_text(files: ModelFiles, name: str, key: str) -> str:
    """The text of a special token that a file names, as a string or an object with its content; empty for none."""
    named = files.record(name).get(key)
    text = named.get("content") if isinstance(named, dict) else named
    return text if isinstance(text, str) else ""


def find_beginning(
    files: ModelFiles, template: tuple[int, ...], tokens: dict[int, str], eot_token: int
) -> tuple[int, ...]:
    """The tokens that the model saw before every document: its begin-of-text token, or none.

    `template` is what tokenizer.json puts before a text; add_bos_token of tokenizer_config.json overrules it, as in
    transformers and llama.cpp. End-of-text is not put a second time: what ended the last document begins the next.
    Raises DataError.
    """
    add = files.record(CONFIG_NAME).get("add_bos_token")
    if add is not None and not isinstance(add, bool):
        raise DataError(f"{files.name}/{CONFIG_NAME}: add_bos_token is {str(add)[:40]!r}, and must be true or false.")
    if add and not template:
        bos = token_text(files, CONFIG_NAME, "bos_token")
        template = tuple(token for token, text in tokens.items() if text == bos)
    beginning = () if add is False or template == (eot_token,) else template
    unknown = [token for token in beginning if token not in tokens]
    if unknown:
        raise DataError(f"{files.name}/{JSON_NAME}: its template puts the token {unknown[0]} first, which it lacks.")
    return beginning
