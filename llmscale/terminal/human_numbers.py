"""Numbers as people write them: parse 70B, 1.4T and 5GB, format them, put nouns in the singular. No torch."""

from __future__ import annotations

import math
import re
from decimal import Decimal

#: Powers of ten.
_SUFFIXES = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
#: Digits, with commas between thousands or single underscores; a fraction; an exponent; a suffix. ASCII alone.
_NUMBER = re.compile(
    r"([+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)?(?:\.[0-9]*)?)(?:e([+-]?[0-9]{1,3}))?([kmbgt]?)",
    re.IGNORECASE | re.ASCII,
)
#: Letters of the longest number: int() takes minutes for a million digits.
_LONGEST = 64
#: A plural after the number 1, for the nouns that llmscale counts.
_COUNTED = re.compile(
    r"(?<![\w.,:/+-])1 ((?:[a-z]+-up |tail |micro-)?(?:rank|host|node|GPU|step|sample|sequence|document|token|shard"
    r"|record|row|layer|head|file|item|run|checkpoint|text|warning|task|attempt|epoch|minute|hour|day|year))s\b(?![./-]\w)"
)


def parse_number(text: str, *, with_suffix: bool = True) -> Decimal:
    """Parse `10M`, `1.4T`, `300e9`, `811,008`, `1_000` or `-0.5` exactly. Raises ValueError.

    Every flag and file is read so. Without suffix where a letter may mean a unit: `30m` are minutes to some.
    """
    if len(text) <= _LONGEST:
        match = _NUMBER.fullmatch(text.strip())
    else:
        match = None
    if match is None or not any(map(str.isdecimal, match[1])) or (match[3] and not with_suffix):
        raise ValueError(text)
    digits = match[1].replace(",", "").replace("_", "")
    return Decimal(f"{digits}e{int(match[2] or 0) + _SUFFIXES[match[3].lower()]}")


def parse_whole(text: str) -> int:
    """Parse `10M`, `1,000,000` or `1.5e3` as a whole number, exactly. Raises ValueError."""
    value = parse_number(text)
    if value != value.to_integral_value():
        raise ValueError(text)
    return int(value)


def parse_quantity(text: str) -> float:
    """Parse `70B`, `1.4T`, `300e9` or `811,008` as a number above 0. Raises ValueError."""
    value = float(parse_number(text))
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def parse_bytes(text: str) -> int:
    """Parse `5GB` (5e9 bytes), `512MiB` (512 * 2**20) or `2TB` as a number of bytes above 0. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT])(i?)B", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    power = "KMGT".index(match[2].upper()) + 1
    value = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if value < 1:
        raise ValueError(text)
    return value


def format_quantity(value: float) -> str:
    """Format with three digits and a suffix: `72.2B`, `1.33T`, `124M`; without a suffix above 999T."""
    for suffix, unit in (("", 1.0), ("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)):
        # 999.6 would be printed as 1000.
        if value < 999.5 * unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format seconds as 45s, 3m20s, 5h07m or 2d04h."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    if rounded < 86400:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
    return f"{rounded // 86400}d{rounded % 86400 // 3600:02d}h"


def format_days(days: float) -> str:
    """Format a number of days: `1 day`, `2.5 days`."""
    return f"{days:g} day{'' if days == 1 else 's'}"


def show_value(value: float) -> str:
    """Format a loss or another result with four digits after the point, or where it is huge four in all."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"


def count_nouns(number: int, noun: str) -> str:
    """Return the number with its noun, such as `1 file` or `1,200 files`. `noun` is the singular."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def with_singulars(text: str) -> str:
    """Return one of llmscale's own texts with `1 rank` in place of `1 ranks`."""
    return _COUNTED.sub(r"1 \1", text)
