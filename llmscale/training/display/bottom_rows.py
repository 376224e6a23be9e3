"""The last rows of a terminal, kept for a view that is drawn again and again. No torch.

The rows above are made the terminal's scrolling region (DECSTBM), and the cursor always stays in it. So whatever
anybody prints, Python or a C++ library, this rank or another one or the launcher, scrolls above the view and tears
nothing; and as the cursor is never hidden, nothing is left to be shown again. Lines that scroll off the top of the
screen go where they always go.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

_SAVE_CURSOR, _RESTORE_CURSOR = "\x1b7", "\x1b8"
_ERASE_LINE, _ERASE_BELOW = "\x1b[2K", "\x1b[J"
_NO_STYLE, _WHOLE_SCREEN = "\x1b[0m", "\x1b[r"
#: One row down in the same column; at the bottom everything scrolls.
_INDEX = "\x1bD"
#: What makes a terminal whole again, whoever reserved rows of it.
GIVE_BACK = f"{_SAVE_CURSOR}{_WHOLE_SCREEN}{_RESTORE_CURSOR}{_ERASE_BELOW}"
#: Rows that are left to everything else.
_LEAST_OTHERS = 4


class BottomRows:
    """Of the terminal behind a file descriptor. Every change is one write, so that no other process writes within."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reserved: tuple[int, int, int] | None = None
        """Columns and rows of the terminal, and how many of them are ours."""
        self._lock = threading.Lock()
        self._is_closed = False

    def size(self) -> tuple[int, int]:
        """(columns, rows that a view may have) of the terminal as it is now. Raises OSError when it is gone."""
        columns, rows = os.get_terminal_size(self._descriptor)
        return columns, max(0, rows - _LEAST_OTHERS)

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines, each no wider than the terminal; as many as there is room for. Raises OSError."""
        with self._lock:
            if self._is_closed:
                return
            columns, rows = os.get_terminal_size(self._descriptor)
            lines = lines[: max(0, rows - _LEAST_OTHERS)]
            wanted = (columns, rows, len(lines))
            text = "" if wanted == self._reserved else self._reserve(rows, len(lines))
            self._reserved = wanted
            first = rows - len(lines) + 1
            drawn = "".join(
                f"\x1b[{first + number};1H{_NO_STYLE}{_ERASE_LINE}{line}" for number, line in enumerate(lines)
            )
            self._write(f"{text}{_SAVE_CURSOR}{drawn}{_NO_STYLE}{_RESTORE_CURSOR}")

    def close(self) -> None:
        """Give the rows back, empty. Never raises; from any thread, also while another one draws for ever."""
        held = self._lock.acquire(timeout=1.0)
        try:
            if not self._is_closed and self._reserved is not None:
                self._write(GIVE_BACK)
        except OSError:
            pass
        finally:
            self._is_closed = True
            if held:
                self._lock.release()

    def _reserve(self, rows: int, height: int) -> str:
        # Below the cursor lies nothing but an older view, wherever a change of size may have moved it.
        if not height:
            return GIVE_BACK
        room = _INDEX * height + f"\x1b[{height}A"
        return f"{GIVE_BACK}{room}{_SAVE_CURSOR}\x1b[1;{rows - height}r{_RESTORE_CURSOR}"

    def _write(self, text: str) -> None:
        rest = text.encode()
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
