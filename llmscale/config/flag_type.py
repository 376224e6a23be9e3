"""`type=` of command-line flags: numbers within bounds, paths and names, each answered in one line. No torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmscale.config.user_paths import check_path, check_path_or_url, check_text
from llmscale.terminal.human_numbers import parse_bytes, parse_quantity

_T = TypeVar("_T")

#: int() takes other alphabets' digits too, and minutes for a million of them.
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")


def whole(lowest: int, highest: int) -> Callable[[str], int]:
    """A whole number from `lowest` to `highest`."""

    def parse(text: str) -> int:
        plain = text.strip().replace("_", "")
        if not _WHOLE.fullmatch(plain) or not lowest <= int(plain) <= highest:
            most = f" and at most {highest:,}" if _is_beyond(text, highest) else ""
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {lowest}{most}, not '{text}'")
        return int(plain)

    return parse


def number(lowest: float, highest: float, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """A number from `lowest` (`above`: beyond it) to `highest` (`below`: short of it)."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_enough = lowest < value if above else lowest <= value
        if not is_enough or not (value < highest if below else value <= highest):
            bound = f"above {lowest:g}" if above else f"of at least {lowest:g}"
            most = f" and {'below' if below else 'at most'} {highest:g}"
            most = most if highest <= 1 or _is_beyond(text, highest) else ""
            raise argparse.ArgumentTypeError(f"must be a number {bound}{most}, not '{text}'")
        return value

    return parse


def quantity(lowest: float, highest: float) -> Callable[[str], float]:
    """A number with or without a suffix, such as 70B."""

    def parse(text: str) -> float:
        try:
            value = parse_quantity(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise argparse.ArgumentTypeError(f"must be a number above 0 such as 5.76e23, 70B or 1.4T, not '{text}'")
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be from {lowest:g} to {highest:g}, not '{text}'")
        return value

    return parse


def byte_size(text: str) -> int:
    """A number of bytes with its unit, such as 5GB or 512MiB."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a size with its unit such as 5GB (10^9 bytes each) or 512MiB (2^20 bytes each), not '{text}'"
        ) from None


def _is_beyond(text: str, highest: float) -> bool:
    """Whether the upper bound is what `text` violates, and therefore worth naming."""
    try:
        return float(text) > highest
    except ValueError:
        return False


def path(text: str) -> Path:
    """A path that the system can take."""
    return _checked(check_path, text)


def name(text: str) -> str:
    """A text that is not blank."""
    return _checked(check_text, text)


def path_or_url(text: str) -> str:
    """A path, or what has a scheme (s3://, hf:)."""
    return _checked(check_path_or_url, text)


def _checked(check: Callable[[str], _T], text: str) -> _T:
    try:
        return check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not '{text}'") from None
