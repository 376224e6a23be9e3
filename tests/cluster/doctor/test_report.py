"""Reports of several hosts make one table: equal findings once, others with their hosts."""

from __future__ import annotations

import pytest

from llmscale.cluster.doctor.report import (
    CheckRow,
    HostReport,
    ProbeRequest,
    SharedValue,
    format_hosts,
    green,
    merge_reports,
    parse_report,
    parse_request,
    print_report,
    print_request,
    red,
    split_error,
)
from llmscale.errors import ConfigError

FAULT = red("port", "29500 is in use", "Choose another one.")


def version(value: str, status: str = "fail") -> SharedValue:
    return SharedValue("versions", value, "Install one.", "torch", status)  # type: ignore[arg-type]


def test_reports_and_requests_arrive() -> None:
    report = HostReport((FAULT,), (version("2.13"),), 8, "10.0.0.1", 29501, "/shared")
    assert parse_report(f"Welcome to Ubuntu\n{print_report(report)}\n") == report
    request = ProbeRequest(("a", "b"), "b", 8, 16, 1234, "x y.json", ("--data", "it's $HOME"), 9.0)
    assert parse_request(print_request(request)) == request


@pytest.mark.parametrize("output", ["", "Welcome\n", 'llmscale-report {"rows": 3}'])
def test_output_without_a_report_is_refused(output: str) -> None:
    with pytest.raises(ConfigError, match=r"printed no report|another llmscale"):
        parse_report(output)
    with pytest.raises(ConfigError, match="another llmscale"):
        parse_request('{"port": "x"}')


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        ((FAULT,), (FAULT,), [FAULT]),
        ((FAULT,), (green("port", "free"),), [red("port", "on a: 29500 is in use", FAULT.fix)]),
        ((green("shm", "8 GiB"),), (green("shm", "8 GiB"),), [green("shm", "8 GiB")]),
        ((green("shm", "8 GiB"),), (green("shm", "9 GiB"),), [green("shm", "8 GiB on a; 9 GiB on b")]),
    ],
)
def test_rows_name_hosts_only_where_these_differ(
    first: tuple[CheckRow, ...], second: tuple[CheckRow, ...], rows: list[CheckRow]
) -> None:
    assert list(merge_reports({"a": HostReport(first), "b": HostReport(second)})) == rows


def test_values_that_must_be_shared() -> None:
    same = {host: HostReport(shared=(version("2.13"),)) for host in "ab"}
    assert list(merge_reports(same)) == [green("versions", "torch 2.13")]
    other = {**same, "b": HostReport(shared=(version("2.12"),))}
    assert list(merge_reports(other)) == [red("versions", "torch: 2.13 on a; 2.12 on b", "Install one.")]
    harmless = {host: HostReport(shared=(version(host, "warn"),)) for host in "ab"}
    assert [row.status for row in merge_reports(harmless)] == ["warn"]


def test_the_first_few_of_many_hosts_are_named() -> None:
    assert format_hosts(f"n{i}" for i in range(20)) == "n0, n1, n2, n3, n4, n5 and 14 more"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x is 3.5 of y. Set it to 4. Or drop it.", ("x is 3.5 of y.", "Set it to 4. Or drop it.")),
        ("x is wrong", ("x is wrong", "Correct the value that it names.")),
    ],
)
def test_an_error_is_a_finding_and_a_fix(text: str, parts: tuple[str, str]) -> None:
    assert split_error(text) == parts
