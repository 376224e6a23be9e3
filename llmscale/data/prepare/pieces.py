"""Cut long documents where no token of a GPT-2-like tokenizer can cross, to encode them in parallel."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: One newline between two characters that are not whitespace. GPT-2's pattern ends a piece before the newline
#: and after it, so the tokens of both sides are the same whether the text is cut behind it or not.
_BORDER = re.compile(r"(?<=\S\n)(?=\S)")


def cut_text(text: str, limit: int) -> Iterator[str]:
    """Consecutive pieces of `text`, each ended at the first border behind `limit` characters."""
    start = 0
    while len(text) - start > limit:
        border = _BORDER.search(text, start + limit)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]
