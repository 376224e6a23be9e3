"""Reports of hosts about themselves, and the table that they make together. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

#: Default rendezvous port of DeepSpeed's launcher.
DEFAULT_PORT = 29500
Status = Literal["ok", "warn", "fail"]
#: From green to red.
SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")
#: Number of host names written out before "and N more".
_MAX_NAMES = 6


@dataclass(frozen=True)
class CheckRow:
    """One row of the table: a check, its result, and the fix."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """One or two sentences; never empty in a red row."""


def green(name: str, text: str) -> CheckRow:
    """Return a row for a check that passed."""
    return CheckRow(name, "ok", text)


def yellow(name: str, text: str, fix: str) -> CheckRow:
    """Return a row for a fault with which a run starts, but slower or less safely."""
    return CheckRow(name, "warn", text, fix)


def red(name: str, text: str, fix: str) -> CheckRow:
    """Return a row for a fault with which a run does not start, or will not finish."""
    return CheckRow(name, "fail", text, fix)


@dataclass(frozen=True)
class SharedValue:
    """A value that all hosts must have in common."""

    name: str
    """Name of its row."""
    value: str
    fix: str
    what: str = ""
    """Name within the row, such as a library's."""
    status: Status = "fail"
    """Status of the row if hosts differ."""


@dataclass(frozen=True)
class ProbeRequest:
    """Question to the probe of one host."""

    hosts: tuple[str, ...] = ()
    """Names of all hosts, as in the hostfile; ranks meet on the first."""
    host: str = ""
    """Name of the asked one."""
    slots: int = 1
    """Ranks on it."""
    world_size: int = 1
    port: int = DEFAULT_PORT
    """Rendezvous port of the ranks on the first host."""
    ds: str | None = None
    """Path of a ds_config on the host."""
    train_flags: tuple[str, ...] | None = None
    """Flags for train.py; None without a run to check."""
    timeout_s: float = 60.0
    """Time limit of the probe."""


@dataclass(frozen=True)
class HostReport:
    """Findings of one host."""

    rows: tuple[CheckRow, ...] = ()
    shared: tuple[SharedValue, ...] = ()
    num_gpus: int = 0
    address: str | None = None
    """First address that is not a loopback's."""
    spare_port: int = DEFAULT_PORT
    """The requested port if it is free, else another free one."""
    folder: str | None = None
    """The run folder, which need not exist yet."""


REPORT = TypeAdapter(HostReport)


def merge_reports(reports: Mapping[str, HostReport]) -> Iterator[CheckRow]:
    """Yield the rows of all hosts, equal ones once, and a row for each value that hosts must share and do not.

    Values that are equal get a row where no other row has their name.
    """
    names = dict.fromkeys(row.name for report in reports.values() for row in report.rows)
    for name in names:
        rows = {host: [row for row in report.rows if row.name == name] for host, report in reports.items()}
        faults = dict.fromkeys(row for host_rows in rows.values() for row in host_rows if row.status != "ok")
        for fault in faults:
            hosts = [host for host, host_rows in rows.items() if fault in host_rows]
            where = f"on {format_hosts(hosts)}: " if len(hosts) < len(reports) else ""
            yield CheckRow(name, fault.status, where + fault.found, fault.fix)
        if not faults:
            yield green(
                name, format_by_host({host: host_rows[0].found for host, host_rows in rows.items() if host_rows})
            )
    yield from (row for row in _compare_shared(reports) if row.status != "ok" or row.name not in names)


def _compare_shared(reports: Mapping[str, HostReport]) -> Iterator[CheckRow]:
    values: dict[tuple[str, str], dict[str, SharedValue]] = {}
    for host, report in reports.items():
        for shared in report.shared:
            values.setdefault((shared.name, shared.what), {})[host] = shared
    equal: dict[str, list[str]] = {}
    for (name, what), by_host in values.items():
        first = next(iter(by_host.values()))
        text = format_by_host({host: shared.value for host, shared in by_host.items()})
        if len({shared.value for shared in by_host.values()}) > 1:
            yield CheckRow(name, first.status, f"{what}: {text}" if what else text, first.fix)
        else:
            equal.setdefault(name, []).append(f"{what} {text}".strip())
    yield from (green(name, ", ".join(values_of_row)) for name, values_of_row in equal.items())


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
