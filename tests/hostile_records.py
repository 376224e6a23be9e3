"""Changes that somebody who means harm makes to a JSON record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


def set_at(*path: str | int, to: object) -> Callable[[Record], None]:
    """A change of what stands at `path`, keys from the outside to the inside."""

    def change(record: Record) -> None:
        place: Any = record
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change
