"""Types of single values in a ds_config: strict where pydantic would guess, with error texts to act on.

Each validator raises ValueError with the end of a sentence that begins with the key's dotted path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import PlainValidator

AUTO = "auto"
#: Beyond these DeepSpeed's arithmetic, in fp32 and 64 bits, has no meaning.
_MAX_NUMBER = 1e18
_MAX_COUNT = 2**63 - 1


def show(value: object) -> str:
    """A value as it stands in the JSON, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {show(value)}.")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty string, not {show(value)}.")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of strings, not {show(value)}.")
    return tuple(_text(item) for item in value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"must be a number of at least 0{_most(value, _MAX_NUMBER)}, not {show(value)}.")
    return float(value)


def _whole(minimum: int, maximum: int = _MAX_COUNT) -> Callable[[object], int]:
    """A whole number; `5e8` is one too, as people write it."""

    def check(value: object) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not minimum <= int(value) <= maximum:  # type: ignore[call-overload]
            raise ValueError(f"must be a whole number of at least {minimum}{_most(value, maximum)}, not {show(value)}.")
        return int(value)  # type: ignore[call-overload]

    return check


def _most(value: object, maximum: float) -> str:
    """The upper bound, where it is what is violated."""
    return f" and at most {maximum:,g}" if isinstance(value, int | float) and value > maximum else ""


def _stage(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError(f"must be 0, 1, 2 or 3, not {show(value)}.")
    return value


def _or_auto(check: Callable[[object], object]) -> Callable[[object], object]:
    def check_or_auto(value: object) -> object:
        return value if value == AUTO else check(value)

    return check_or_auto


Auto = Literal["auto"]
Stage = Annotated[Literal[0, 1, 2, 3], PlainValidator(_stage)]
Flag = Annotated[bool, PlainValidator(_flag)]
Text = Annotated[str, PlainValidator(_text)]
Texts = Annotated[tuple[str, ...], PlainValidator(_texts)]
Number = Annotated[float, PlainValidator(_number)]
Count = Annotated[int, PlainValidator(_whole(0))]
Positive = Annotated[int, PlainValidator(_whole(1))]
Power = Annotated[int, PlainValidator(_whole(0, 64))]
"""Of two, as an fp16 loss scale."""
Depth = Annotated[int, PlainValidator(_whole(-1))]
"""Levels of nesting; -1: all."""
FlagOrAuto = Annotated[bool | Auto, PlainValidator(_or_auto(_flag))]
NumberOrAuto = Annotated[float | Auto, PlainValidator(_or_auto(_number))]
CountOrAuto = Annotated[int | Auto, PlainValidator(_or_auto(_whole(0)))]
PositiveOrAuto = Annotated[int | Auto, PlainValidator(_or_auto(_whole(1)))]
