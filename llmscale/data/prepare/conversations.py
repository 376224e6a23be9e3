"""Recognise conversations in records of every form that people have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

#: What `--chat` reads, for messages.
FORMS = (
    "messages of role and content; prompt and completion; ShareGPT's conversations of from and value; Alpaca's "
    "instruction, input and output"
)
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
_SHAREGPT = "conversations"
#: Fields that become turns where a form has them. All others go to the template.
_ALPACA = ("instruction", "input", "output", "history")
#: Noncharacters of Unicode, which no text has: they mark places in it.
NONCHARACTERS = "[\ufdd0-\ufdef]"
_UNFIT = re.compile(f"({NONCHARACTERS})|[\ud800-\udfff]")

#: A turn of a conversation: its role, its content, and what else its template may read.
Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as a template's text, or why it has none."""

    text: str = ""
    turns: Sequence[Sequence[int]] = ()
    """Begin and end of each part that is a target."""
    refusal: str = ""
    """Why the conversation is left out, to follow the word `conversation`."""
    dropped: str = ""
    """Role of a turn whose text the template drops."""
    example: str = ""
    """Dropped text."""


def conversation_text(record: Mapping[str, object], field: str) -> str:
    """Return the conversation of a record as two lines of JSON: its turns and tools, and what else it tells a template.

    Raises KeyError for a record without one.
    """
    rest = dict(record)
    turns = _take_turns(rest, field)
    system = rest.get("system")
    if isinstance(system, str) and not (turns and turns[0]["role"] == "system"):
        del rest["system"]
        turns[:0] = [{"role": "system", "content": system}] if system.strip() else []
    options = rest.pop("chat_template_kwargs", None)
    rest |= options if isinstance(options, dict) else {}
    tools = rest.pop("tools", None)
    if isinstance(tools, str):
        tools = _parsed(tools)
    conversation = {"messages": turns, **({"tools": tools} if tools else {})}
    lines = [json.dumps(one, ensure_ascii=False, default=lambda _: None) for one in (conversation, rest)]
    # The second line tells copies apart that differ in their numbers alone.
    return _UNFIT.sub(lambda match: "" if match[1] else "\ufffd", "\n".join(lines if rest else lines[:1]))


def _take_turns(record: dict[str, object], field: str) -> list[dict[str, object]]:
    """Remove a conversation's fields from a record and return its turns. Raises KeyError."""
    if field in record:
        value = record.pop(field)
        return _turns(_parsed(value) if isinstance(value, str) else value, "")
    if "prompt" in record and "completion" in record:
        return [*_turns(record.pop("prompt"), "user"), *_turns(record.pop("completion"), "assistant")]
    if _SHAREGPT in record:
        value = record.pop(_SHAREGPT)
        return _turns(_parsed(value) if isinstance(value, str) else value, "")
    if "instruction" in record and "output" in record:
        return list(_alpaca_turns(*(record.pop(name, None) for name in _ALPACA)))
    raise KeyError(field)


def _alpaca_turns(instruction: object, context: object, output: object, history: object) -> Iterator[dict[str, object]]:
    for pair in history if isinstance(history, list) else ():
        if isinstance(pair, list) and len(pair) == 2:
            yield {"role": "user", "content": pair[0]}
            yield {"role": "assistant", "content": pair[1]}
    texts = [text for text in (instruction, context) if isinstance(text, str) and text.strip()]
    yield {"role": "user", "content": "\n".join(texts)}
    yield {"role": "assistant", "content": output}


def _parsed(text: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _turns(value: object, role: str) -> list[dict[str, object]]:
    """Return turns with a role and a content; a text is one of `role`. Anything else becomes a turn without a role."""
    turns = [{"role": role, "content": value}] if isinstance(value, str) else value
    return [_turn(turn if isinstance(turn, dict) else {}) for turn in (turns if isinstance(turns, list) else [])]


def _turn(turn: Mapping[str, object]) -> dict[str, object]:
    """Return a turn with its role and content by the names of OpenAI, and all its other keys."""
    role = str(turn.get("role", turn.get("from", "")))
    made: dict[str, object] = {"role": _SHAREGPT_ROLES.get(role, role)}
    for name in ("value", "content"):
        if name in turn:
            made["content"] = turn[name]
    others = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    return made | others


def without_nulls(value: object) -> object:
    """Return a value of a table without nulls: they are keys that a record lacks."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [without_nulls(inner) for inner in value]
    return value
