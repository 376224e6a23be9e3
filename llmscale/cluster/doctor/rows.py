"""One line of the doctor's table, and how findings of many hosts become one text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
#: From green to red.
SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")
#: Host names that are written out before "and N more".
_MOST_NAMES = 6


@dataclass(frozen=True)
class CheckRow:
    """What was looked at, how it is, and what to do about it."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """One or two sentences; never empty in a red row."""


def green(name: str, found: str) -> CheckRow:
    """As it should be."""
    return CheckRow(name, "ok", found)


def yellow(name: str, found: str, fix: str) -> CheckRow:
    """A run starts, but not as well as it could."""
    return CheckRow(name, "warn", found, fix)


def red(name: str, found: str, fix: str) -> CheckRow:
    """A run does not start, or will not end."""
    return CheckRow(name, "fail", found, fix)


def split_error(text: str) -> tuple[str, str]:
    """An error's text as finding and fix: ours say what is wrong in the first sentence and what to do in the others."""
    found, *rest = re.split(r"(?<=[.!?]) (?=[A-Z`'(])", text, maxsplit=1)
    return found, rest[0] if rest else "Change what it names."


def worst(rows: Iterable[CheckRow]) -> Status:
    """The reddest status among rows; ok when there are none."""
    return max((row.status for row in rows), key=SEVERITY.index, default="ok")


def listed(names: Iterable[str]) -> str:
    """Host names with commas, the first few of many."""
    names = list(names)
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def grouped(values: Mapping[str, object]) -> str:
    """`{"a": 1, "b": 1, "c": 2}` as "1 on a, b; 2 on c", or just "1" when all are the same."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(str(value), []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    return "; ".join(f"{value} on {listed(names)}" for value, names in hosts.items())


def placed(values: Mapping[str, object]) -> str:
    """As grouped, but the hosts are always named."""
    text = grouped(values)
    return text if differ(values) else f"{text} on {listed(values)}"


def differ(values: Mapping[str, object]) -> bool:
    """Whether hosts have different values."""
    return len({str(value) for value in values.values()}) > 1
