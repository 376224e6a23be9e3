"""Colour on terminals.

NO_COLOR (https://no-color.org) switches it off, whatever its value. FORCE_COLOR (https://force-color.org) switches it
on, also in a pipe. Otherwise every terminal gets colours unless TERM is `dumb`.
"""

from __future__ import annotations

import os
from typing import Literal

Style = Literal["red", "green", "yellow", "bold", "dim"]
_CODES: dict[Style, int] = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}


def is_terminal(stream: object) -> bool:
    """Return whether `stream` is a terminal; False for None and for a closed stream."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]  # anything without this method is not a terminal
    except (AttributeError, ValueError, OSError):
        return False


def terminal_columns(stream: object) -> int | None:
    """Return the width of the terminal behind `stream`; None for another stream, and for a terminal without width."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None  # type: ignore[attr-defined]  # as above
    except (AttributeError, ValueError, OSError):
        return None


def can_redraw(stream: object) -> bool:
    """Return whether a line already written to `stream` can be overwritten."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def has_colour(stream: object) -> bool:
    """Return whether text for `stream` is coloured."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") not in ("", "0") or can_redraw(stream)


def paint(text: str, style: Style, stream: object) -> str:
    """Return `text` with the codes of `style` if `stream` is coloured."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text and has_colour(stream) else text
