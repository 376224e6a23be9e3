"""Turn conversations into tokens by a chat template, and mark those that are targets."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llmscale.data.prepare.chat_template import DEFAULT_TEMPLATE, ChatTemplate, end_turns
from llmscale.data.prepare.conversations import Message, Rendered
from llmscale.data.shards.manifest import TrainOn
from llmscale.data.shards.token_shards import BEGIN, TARGET, Marked, ids_of
from llmscale.data.tokenizers.hugging_face import CONFIG_NAME, TEMPLATE_NAME, HuggingFaceTokenizer, token_text
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import DataError

#: Special tokens that templates know by these names.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NAME_OF_END = re.compile("im_end|eot|end_of_turn|turn_end|eom|^<.?end.?>$", re.IGNORECASE)
#: Reasons for which a conversation is left out.
TOO_LONG = "longer than a row"
NO_TARGET = "without a target"


def find_template(tokenizer: Tokenizer, source: str | None = None, end: str = "") -> ChatTemplate:
    """Return the template `source`, else the tokenizer's own, else the default; its turns end with the token `end`.

    Raises DataError.
    """
    special: dict[str, str] = {}
    own = None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files = tokenizer.files
        special = {key: text for key in _SPECIAL if (text := token_text(files, CONFIG_NAME, key))}
        named = files.record(CONFIG_NAME).get("chat_template")
        if isinstance(named, list):  # several by name
            by_name = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
            named = by_name.get("default")
        own = files.others[TEMPLATE_NAME].decode(errors="replace") if TEMPLATE_NAME in files.others else named
    name = "the chat template"
    if source is None and isinstance(own, str) and own:
        source, name = own, f"the chat template of {tokenizer.spec}"
    elif source is None:
        source, name = DEFAULT_TEMPLATE, "the default chat template"
    if not end:
        return ChatTemplate(source, special, name)
    if len(tokenizer.encode(end)) != 1:
        raise DataError(f"--end-of-turn {end!r} is not one token of {tokenizer.spec}.{_describe_ends(tokenizer)}")
    if end in ChatTemplate(source, special, name).end_of_turn:
        raise DataError(f"--end-of-turn {end!r} is what {name} ends the assistant's turns with. Drop the flag.")
    return ChatTemplate(end_turns(source, end), special, name)


def _describe_ends(tokenizer: Tokenizer) -> str:
    """Return a sentence on the special tokens that may end a turn, those that are named like that first."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        texts = tokenizer.special_texts()
    else:
        texts = ()
    ends = sorted(texts, key=lambda text: not _NAME_OF_END.search(text))[:4]
    if ends:
        return f" It has {', '.join(map(repr, ends))}."
    return ""


def describe_template(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[str]:
    """Yield notes on what a template does that nobody asked for. The tokenizer parses special tokens."""
    if template.default_system:
        added = template.default_system[:80]
        yield f"Conversations without a system text get that of {template.name}: {added!r}."
    if "strftime_now" in template.source:
        yield f"{template.name} asks for the date of today. None enters the data, so it takes its own, if it has one."
    if not template.stops:
        yield (
            f"{template.name[0].upper()}{template.name[1:]} ends turns of the assistant with no token, so the model "
            f"learns no end: --end-of-turn TOKEN adds one, --eot-token tells it from that between conversations."
            f"{_describe_ends(tokenizer)}"
        )


class ChatSettings(NamedTuple):
    """Choices of a dataset of conversations."""

    template: ChatTemplate
    train_on: TrainOn = "assistant"
    truncates: bool = False
    """True to cut a conversation that is longer than a row."""
    packs: bool = True
    """True if a row may hold several conversations."""


class Encoded(NamedTuple):
    """A conversation's tokens, or the reason for leaving it out."""

    tokens: Marked
    """Marked tokens with end-of-text. Nothing precedes the first, which does not count as a target."""
    refusal: str = ""
    """Why the conversation is left out."""
    dropped: str = ""
    """Sentence on the text that the template drops."""


class ChatEncoder:
    """Encodes conversations; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, settings: ChatSettings, seq_len: int) -> None:
        """The tokenizer parses special tokens. A row has seq_len + 1 tokens."""
        self._tokenizer = tokenizer
        self._settings = settings
        self._length = seq_len + 1

    def encode_conversations(self, documents: Sequence[str]) -> Iterator[Encoded]:
        """Yield the tokens of each conversation, given as `conversation_text` returns it. Raises DataError."""
        for document in documents:
            if not document.startswith('{"messages": ['):
                raise DataError(
                    f"--chat reads records with conversations, and found the text {document[:60]!r}. Leave out --chat "
                    "for text."
                )
        return map(self._encode_rendered, self._settings.template.render_documents(documents))

    def _encode_rendered(self, rendered: Rendered) -> Encoded:
        settings = self._settings
        nothing = np.zeros(0, np.uint32)
        if rendered.refusal:
            return Encoded(nothing, rendered.refusal)
        if rendered.dropped:
            reason = f"{settings.template.name} drops a text of {rendered.dropped}, {rendered.example[:60]!r}"
            return Encoded(nothing, f"with a text of {rendered.dropped} that the template drops", reason)
        tokens = self._encode(rendered.text, rendered.turns)
        if settings.train_on == "all":
            tokens |= TARGET
        end = np.uint32(self._tokenizer.eot_token)
        is_end = (tokens & ~TARGET) == end
        if settings.packs and is_end[:-1].any():
            raise DataError(
                f"{settings.template.name} uses the end-of-text token {self._tokenizer.decode([int(end)])!r} within "
                "conversations, so that they could not be told apart in a row. Name another token of the vocabulary "
                "with --eot-token, or give each a row of its own with --packing pad."
            )
        if not is_end[-1:].any():
            tokens = np.append(tokens, end | (TARGET if settings.train_on == "all" else np.uint32(0)))
        if len(tokens) > self._length and not settings.truncates:
            return Encoded(nothing, TOO_LONG)
        tokens = tokens[: self._length]
        tokens[0] = tokens[0] & ~TARGET | BEGIN
        if (tokens & TARGET).any():
            return Encoded(tokens)
        return Encoded(nothing, NO_TARGET)

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids that the assistant's next turn continues, encoded as in training. Raises DataError."""
        template = self._settings.template
        text = template.render(messages, prompts=True)
        turns: Sequence[Sequence[int]] = ()
        if not isinstance(self._tokenizer, HuggingFaceTokenizer):  # encodes turns apart
            [so_far] = template.render_documents([json.dumps({"messages": messages})])
            turns = [turn for turn in so_far.turns if text.startswith(so_far.text[: turn[1]])]
        tokens: list[int] = ids_of(self._encode(text, turns)).tolist()
        return tokens

    def _encode(self, text: str, turns: Sequence[Sequence[int]]) -> Marked:
        """Return the tokens of a text with marks of those in `turns`."""
        borders = [place for turn in turns for place in turn]
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            ids, places = self._tokenizer.encode_with_places(text)
            is_target = [_is_within(borders, begin, end) for begin, end in places]
            return np.array(ids, np.uint32) | np.where(is_target, TARGET, np.uint32(0)).astype(np.uint32)
        pieces = self._tokenizer.encode_batch([text[a:b] for a, b in pairwise([0, *borders, len(text)])])
        return np.concatenate([piece | (TARGET * np.uint32(number % 2)) for number, piece in enumerate(pieces)])


def _is_within(borders: Sequence[int], begin: int, end: int) -> bool:
    """Return whether a token ends within a turn, or holds its end, as in transformers. Its begin leaves out white
    space."""
    place = bisect_left(borders, end)
    return place % 2 == 1 or (place > 0 and begin < borders[place - 1] < end)
