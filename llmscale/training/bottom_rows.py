"""The last rows of a terminal, reserved for a view that is drawn repeatedly. No torch.

The rows above become the terminal's scrolling region (DECSTBM), and the cursor always stays in it. Everything printed
by Python, a C++ library, another rank or the launcher scrolls above the view and tears nothing. The cursor is never
hidden, so it need not be restored. Lines that scroll off the top go to the terminal's history as usual.
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
#: Frees the reserved rows, whoever reserved them.
GIVE_BACK = f"{_SAVE_CURSOR}{_WHOLE_SCREEN}{_RESTORE_CURSOR}{_ERASE_BELOW}"
#: Rows left to all other output.
_MIN_OTHER_ROWS = 4


class BottomRows:
    """The reserved rows of one terminal. Every change is one write, which no other process can interrupt."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reserved: tuple[int, int, int] | None = None
        """Columns and rows of the terminal, and the number of reserved rows."""
        self._lock = threading.Lock()
        self._is_closed = False

    def size(self) -> tuple[int, int]:
        """Return (columns, rows that a view may have) of the terminal. Raises OSError if it is gone."""
        columns, rows = os.get_terminal_size(self._descriptor)
        return columns, max(0, rows - _MIN_OTHER_ROWS)

    def draw(self, lines: Sequence[str]) -> None:
        """Show as many lines as fit, each no wider than the terminal. Raises OSError."""
        with self._lock:
            if self._is_closed:
                return
            columns, rows = os.get_terminal_size(self._descriptor)
            lines = lines[: max(0, rows - _MIN_OTHER_ROWS)]
            wanted = (columns, rows, len(lines))
            text = "" if wanted == self._reserved else self._reserve(rows, len(lines))
            self._reserved = wanted
            first = rows - len(lines) + 1
            drawn = "".join(
                f"\x1b[{first + number};1H{_NO_STYLE}{_ERASE_LINE}{line}" for number, line in enumerate(lines)
            )
            self._write(f"{text}{_SAVE_CURSOR}{drawn}{_NO_STYLE}{_RESTORE_CURSOR}")

    def close(self) -> None:
        """Free the rows. Never raises; safe from any thread, even while another one hangs in `draw`."""
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
        # Only an older view can be below the cursor, wherever a change of size moved it.
        if not height:
            return GIVE_BACK
        room = _INDEX * height + f"\x1b[{height}A"
        return f"{GIVE_BACK}{room}{_SAVE_CURSOR}\x1b[1;{rows - height}r{_RESTORE_CURSOR}"

    def _write(self, text: str) -> None:
        rest = text.encode()
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
