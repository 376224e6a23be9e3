"""Plain values in JSON that come back with their types: tuples, keys that are numbers, counters. No torch.

JSON would return a tuple as a list, and the key 5 as "5": a schedule with milestones would then never reach one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import cast

from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import MAX_BYTES

#: Key of the only entry of an object that replaces a value of a type that JSON lacks.
_TUPLE = "__tuple__"
_PAIRS = "__pairs__"
_COUNTER = "__counter__"
_MARKS = {_TUPLE, _PAIRS, _COUNTER}
#: Most characters of the values of one checkpoint.
MOST_CHARACTERS = MAX_BYTES // 2
#: Depth at which a value is one that contains itself.
_MOST_DEPTH = 40


def to_json(value: object, what: str, depth: int = 0) -> object:
    """Return a value as JSON has it, for `from_json`. `what` names it in messages.

    Raises CheckpointError unless it consists of None, booleans, numbers, text, lists, tuples and mappings. A number of
    NumPy's or torch's becomes Python's.
    """
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"{what} is nested more than {_MOST_DEPTH} deep, or contains itself.")
    if value is None or isinstance(value, bool | int | float | str):
        return _plain_number(value)
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{what}[{place}]", depth + 1) for place, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _mapping_to_json(value, what, depth)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return to_json(value.item(), what, depth + 1)
    raise CheckpointError(
        f"{what} is a {type(value).__name__}. Beside tensors, a checkpoint keeps None, booleans, numbers, text, lists, "
        "tuples and mappings of them."
    )


def _plain_number(value: bool | int | float | str | None) -> object:
    """Return a value of a subclass, such as an enumeration's, as one of Python's own type."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _mapping_to_json(value: Mapping[object, object], what: str, depth: int) -> object:
    pairs = [(key, to_json(entry, f"{what}[{str(key)[:80]!r}]", depth + 1)) for key, entry in value.items()]
    if all(isinstance(key, str) for key, _ in pairs) and not isinstance(value, Counter):
        names = cast("list[tuple[str, object]]", pairs)
        if not _MARKS & {key for key, _ in names}:
            return dict(names)
    mark = _COUNTER if isinstance(value, Counter) else _PAIRS
    return {mark: [[to_json(key, f"a key of {what}", depth + 1), entry] for key, entry in pairs]}


def from_json(value: object) -> object:
    """Return what `to_json` was given. Raises CheckpointError for a malformed value: a checkpoint is not trusted."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), None)
    if len(value) != 1 or mark not in _MARKS:
        return {key: from_json(entry) for key, entry in value.items()}
    items = value[mark]
    if not isinstance(items, list):
        raise CheckpointError(f"a saved value is damaged: '{mark}' must be a list.")
    if mark == _TUPLE:
        return tuple(from_json(item) for item in items)
    try:
        entries = {from_json(key): from_json(entry) for key, entry in items}
        if mark == _COUNTER:
            return Counter(entries)
        return entries
    except (TypeError, ValueError):
        raise CheckpointError(f"a saved value is damaged: '{mark}' holds no pairs of a key and a value.") from None
