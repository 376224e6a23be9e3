"""Reports of hosts about themselves, and the table that they make together. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

Status = Literal["ok", "warn", "fail"]
#: From green to red.
SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")
#: Number of host names written out before "and N more".
_MAX_NAMES = 6


@dataclass(frozen=True)
class CheckRow:
    """One row of the table: a check, its result, and the fix. Rows of one name are shown as one if all are green."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """One or two sentences; never empty in a red row."""
    what: str = ""
    """Name of a value that all hosts must have in common, such as a library's."""
    status_if_other: Status = "ok"
    """Status of the row if hosts differ in that value."""


def green(name: str, text: str) -> CheckRow:
    """Return a row for a check that passed."""
    return CheckRow(name, "ok", text)


def yellow(name: str, text: str, fix: str) -> CheckRow:
    """Return a row for a fault with which a run starts, but slower or less safely."""
    return CheckRow(name, "warn", text, fix)


def red(name: str, text: str, fix: str) -> CheckRow:
    """Return a row for a fault with which a run does not start, or will not finish."""
    return CheckRow(name, "fail", text, fix)


def shared(name: str, what: str, value: str, fix: str, status_if_other: Status = "fail") -> CheckRow:
    """Return a row for a value that all hosts must have in common."""
    return CheckRow(name, "ok", value, fix, what, status_if_other)


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Question to the probe of a host."""

    hosts: Mapping[str, int]
    """Slots of all hosts, as in the hostfile; ranks meet on the first."""
    host: str = ""
    """Name of the asked one."""
    port: int
    """Rendezvous port of the ranks on the first host."""
    ds: str | None = None
    """Path of a ds_config."""
    train_flags: tuple[str, ...] = ()
    """Flags of train.py, among them --config; empty without a run to check."""
    timeout_s: float = 60.0
    """Time limit of the probe."""

    @property
    def slots(self) -> int:
        return self.hosts[self.host]

    @property
    def world_size(self) -> int:
        return sum(self.hosts.values())


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Findings of one host."""

    rows: tuple[CheckRow, ...] = ()
    num_gpus: int = 0
    address: str | None = None
    """First address that is not a loopback's."""
    spare_port: int = 0
    """The requested port if it is free, else another free one."""
    folder: str | None = None
    """The run folder, which need not exist yet."""


REPORT = TypeAdapter(HostReport)


def merge_reports(reports: Mapping[str, HostReport]) -> Iterator[CheckRow]:
    """Yield the rows of all hosts: every fault and every difference, and one green row for a name without any."""
    for name in dict.fromkeys(row.name for report in reports.values() for row in report.rows):
        rows = {host: [row for row in report.rows if row.name == name] for host, report in reports.items()}
        merged = [*_faults(rows), *_differences(rows)]
        yield from merged
        if not merged:
            whats = dict.fromkeys(row.what for host_rows in rows.values() for row in host_rows)
            yield green(name, ", ".join(f"{what} {format_by_host(_values(rows, what))}".strip() for what in whats))


def _faults(rows: Mapping[str, list[CheckRow]]) -> Iterator[CheckRow]:
    for fault in dict.fromkeys(row for host_rows in rows.values() for row in host_rows if row.status != "ok"):
        hosts = [host for host, host_rows in rows.items() if fault in host_rows]
        if len(hosts) < len(rows):
            where = f"on {format_hosts(hosts)}: "
        else:
            where = ""
        yield CheckRow(fault.name, fault.status, where + fault.found, fault.fix)


def _differences(rows: Mapping[str, list[CheckRow]]) -> Iterator[CheckRow]:
    firsts: dict[str, CheckRow] = {}
    for row in (row for host_rows in rows.values() for row in host_rows):
        firsts.setdefault(row.what, row)
    for what, first in firsts.items():
        values = _values(rows, what)
        if what and len(set(values.values())) > 1:
            yield CheckRow(first.name, first.status_if_other, f"{what}: {format_by_host(values)}", first.fix)


def _values(rows: Mapping[str, list[CheckRow]], what: str) -> dict[str, str]:
    """Return the text of the rows about a value, by host."""
    return {host: row.found for host, host_rows in rows.items() for row in host_rows if row.what == what}


def split_error(text: str) -> tuple[str, str]:
    """Split an error's text into finding and fix: its first sentence, and the others."""
    first, *rest = re.split(r"(?<=[.!?]) (?=[A-Z`'(])", text, maxsplit=1)
    return first, rest[0] if rest else "Correct the value that it names."


def worst(rows: Iterable[CheckRow]) -> Status:
    """Return the most severe status among rows; ok without rows."""
    return max((row.status for row in rows), key=SEVERITY.index, default="ok")


def format_hosts(names: Iterable[str]) -> str:
    """Join host names with commas, the first few of many."""
    names = list(names)
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def format_by_host(values: Mapping[str, str]) -> str:
    """Format `{"a": "1", "b": "1", "c": "2"}` as "1 on a, b; 2 on c".

    A value that all hosts share comes without their names.
    """
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    return "; ".join(f"{value} on {format_hosts(names)}" for value, names in hosts.items())
