"""Colour, where a terminal shows it and nobody has said no.

NO_COLOR (https://no-color.org) says no, whatever its value; FORCE_COLOR (https://force-color.org) says yes, also into a
pipe. Else a terminal gets colours unless it is called dumb.
"""

from __future__ import annotations

import os
from typing import Literal

Style = Literal["red", "green", "yellow", "bold", "dim"]
_CODES: dict[Style, int] = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}


def is_terminal(stream: object) -> bool:
    """Whether somebody looks at what is written to `stream`; False for none, and for one that is closed."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]  # what has no such method is no terminal
    except (AttributeError, ValueError, OSError):
        return False


def can_redraw(stream: object) -> bool:
    """Whether a line of `stream` can be written anew."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def has_colour(stream: object) -> bool:
    """Whether `stream` gets colours."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") not in ("", "0") or can_redraw(stream)


def paint(text: str, style: Style, stream: object) -> str:
    """`text` as `stream` should get it."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text and has_colour(stream) else text
