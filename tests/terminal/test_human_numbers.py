from __future__ import annotations

from decimal import Decimal

import pytest

from llmscale.terminal.human_numbers import (
    format_quantity,
    parse_bytes,
    parse_number,
    parse_quantity,
    parse_whole,
    with_singulars,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("70B", 70e9),
        ("1.4T", 1.4e12),
        ("1.4t", 1.4e12),
        ("124M", 124e6),
        ("2k", 2000),
        ("300e9", 300e9),
        ("5.76e+23", 5.76e23),
        ("811,008", 811_008),
        ("1_000", 1000),
        (" 3 ", 3),
    ],
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "abc", "-1", "0", "0B", "70X", "7BB", "inf", "nan", "1e400", "1.2.3", "1,5", "1,0000", "٣"]
)
def test_what_is_no_number_above_0_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_quantity(text)


def test_whole_numbers_are_exact() -> None:
    assert parse_whole("9,223,372,036,854,775,807") == 2**63 - 1
    assert parse_whole("1.5k") == 1500
    for text in ("1.5", "1e-3", "1" * 65, "1__0", "M"):
        with pytest.raises(ValueError):
            parse_whole(text)


def test_a_letter_may_be_refused_where_it_could_be_a_unit() -> None:
    assert parse_number("1,000.5", with_suffix=False) == Decimal("1000.5")
    with pytest.raises(ValueError):
        parse_number("30m", with_suffix=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72.2487e9, "72.2B"),
        (1.3287e12, "1.33T"),
        (124_475_904, "124M"),
        (999_600, "1M"),
        (5.76e23, "5.76e+23"),
        (12, "12"),
    ],
)
def test_three_digits_and_a_suffix(value: float, text: str) -> None:
    assert format_quantity(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("40kB", 40_000),
        ("2TB", 2e12),
    ],
)
def test_sizes_have_a_unit(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "5", "5G", "5B", "GB", "0GB", "-5GB", "1e3GB", "5GBs", "infGB", "0.0001KB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_one_of_something_is_singular() -> None:
    assert with_singulars("1 ranks on 1 nodes, 1 warm-up steps") == "1 rank on 1 node, 1 warm-up step"
    other = "11 ranks, 0.1 steps, 1,001 tokens, step-1 files, 1 has"
    assert with_singulars(other) == other


def test_the_name_of_a_file_is_left_as_it_is() -> None:
    assert with_singulars("cannot read 1 samples.txt of 1 files.") == "cannot read 1 samples.txt of 1 file."
