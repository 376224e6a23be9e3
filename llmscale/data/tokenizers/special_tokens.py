"""Which tokens of a tokenizer.json a text must not become."""

from __future__ import annotations

import re

#: How the markers of chats and of code filling are written (DeepSeek's with full-width bars), and nothing that people
#: write.
_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_BRACKETED = re.compile(r"<.*>|\[.*\]", re.DOTALL)


def with_special_markers(record: dict[str, object], template: str) -> dict[str, object]:
    """The same tokenizer with every marker called special, which makes it text; `record` itself where all are.

    Markers are added tokens of the form <|...|>, and those in brackets that the chat `template` writes: Qwen's
    <|fim_prefix|> and <tool_call>. Other added tokens (runs of spaces, HTML tags, words) are how the model reads text.
    """
    entries = _added(record)
    marks = [not entry.get("special") and _is_marker(str(entry.get("content")), template) for entry in entries]
    if not any(marks):
        return record
    special = [{**entry, "special": True} if mark else entry for entry, mark in zip(entries, marks, strict=True)]
    return {**record, "added_tokens": special}


def special_ids(record: dict[str, object]) -> list[int]:
    """Of the special tokens, without the one for what is unknown: that is what a text becomes."""
    model = record.get("model")
    unknown = (model.get("unk_token"), model.get("unk_id")) if isinstance(model, dict) else ()
    ids = [(entry.get("id"), entry.get("content")) for entry in _added(record) if entry.get("special")]
    return [token for token, text in ids if isinstance(token, int) and text not in unknown and token not in unknown]


def without_special(record: dict[str, object]) -> dict[str, object]:
    """The same tokenizer, which looks for no special token in a text and puts none around it."""
    plain = [entry for entry in _added(record) if not entry.get("special")]
    return {**record, "added_tokens": plain, "post_processor": None}


def are_all_special(record: dict[str, object]) -> bool:
    """Whether no added token is looked for in a text."""
    return all(entry.get("special") for entry in _added(record))


def _added(record: dict[str, object]) -> list[dict[str, object]]:
    added = record.get("added_tokens")
    return added if isinstance(added, list) else []


def _is_marker(text: str, template: str) -> bool:
    return bool(_MARKER.fullmatch(text)) or (bool(_BRACKETED.fullmatch(text)) and text in template)
