r"""Make text from files, hosts and models safe to print: a terminal obeys any control character.

An escape sequence in a file name, a sample or a host's answer can rename the window, move the cursor over what was
printed before or, in some terminals, type a command. Unicode's direction marks show text in another order than it has.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

#: Characters that a terminal may act on or hide: C0 but tab and newline, DEL, C1; line and paragraph separators;
#: direction marks (Boucher & Anderson, "Trojan Source", 2021); zero-width characters but the joiners that scripts and
#: emoji need; interlinear marks; lone surrogates, which cannot be encoded; tag characters.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_BREAKS = re.compile(r"[\t\n]")


def make_visible(text: str) -> str:
    r"""Return `text` with control characters written out as `\\x1b`; tabs and newlines stay."""
    return _HIDDEN.sub(_escape, text)


def make_visible_line(text: str) -> str:
    r"""Return `text` as one line: like make_visible, with tabs and newlines written out as well."""
    return _BREAKS.sub(_escape, make_visible(text))


def is_visible(text: str) -> bool:
    """Return whether make_visible_line would leave `text` unchanged."""
    return not _HIDDEN.search(text) and not _BREAKS.search(text)


def print_visible(text: object, *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print text from an untrusted source, control characters written out; to stdout by default."""
    print(make_visible(str(text)), file=file or sys.stdout, flush=flush)


def print_to_stderr(line: str) -> None:
    """Print a line as `print_visible` does, on stderr and at once."""
    print_visible(line, file=sys.stderr, flush=True)


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
