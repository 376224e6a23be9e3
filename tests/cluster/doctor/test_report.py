"""Reports of several hosts make one table: equal findings once, others with their hosts."""

from __future__ import annotations

import pytest

from llmscale.cluster.doctor.report import (
    CheckRow,
    HostReport,
    format_hosts,
    green,
    merge_reports,
    red,
    shared,
    split_error,
)

FAULT = red("port", "29500 is in use", "Choose another one.")


def torch(version: str, status: str = "fail") -> CheckRow:
    return shared("versions", "torch", version, "Install one.", status)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        ((FAULT,), (FAULT,), [FAULT]),
        ((FAULT,), (green("port", "free"),), [red("port", "on a: 29500 is in use", FAULT.fix)]),
        ((green("shm", "8 GiB"),), (green("shm", "8 GiB"),), [green("shm", "8 GiB")]),
        ((green("shm", "8 GiB"),), (green("shm", "9 GiB"),), [green("shm", "8 GiB on a; 9 GiB on b")]),
        ((green("port", "free"),), (), [green("port", "free")]),
        ((torch("2.13"),), (torch("2.13"),), [green("versions", "torch 2.13")]),
        ((torch("2.13"),), (torch("2.12"),), [red("versions", "torch: 2.13 on a; 2.12 on b", "Install one.")]),
    ],
)
def test_rows_name_hosts_only_where_these_differ(
    first: tuple[CheckRow, ...], second: tuple[CheckRow, ...], rows: list[CheckRow]
) -> None:
    assert list(merge_reports({"a": HostReport(rows=first), "b": HostReport(rows=second)})) == rows


def test_a_difference_that_harms_little_is_yellow() -> None:
    reports = {host: HostReport(rows=(torch(host, "warn"), green("versions", "fine"))) for host in "ab"}
    assert [row.status for row in merge_reports(reports)] == ["warn"]


def test_the_first_few_of_many_hosts_are_named() -> None:
    assert format_hosts(f"n{i}" for i in range(20)) == "n0, n1, n2, n3, n4, n5 and 14 more"


def test_an_error_is_a_finding_and_a_fix() -> None:
    assert split_error("x is 3.5 of y. Set it to 4. Or drop it.") == ("x is 3.5 of y.", "Set it to 4. Or drop it.")
    assert split_error("x is wrong") == ("x is wrong", "Correct the value that it names.")
