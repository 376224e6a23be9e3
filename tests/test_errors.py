"""What a user's mistake is answered with."""

from __future__ import annotations

import pytest

from llmscale.errors import did_you_mean

CARDS = ("a100-80gb", "h100-80gb", "h100-80gb-pcie", "h200", "t4", "v100-16gb")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("h100", "h100-80gb"), ("t4-16gb", "t4"), ("a100-80", "a100-80gb"), ("h20", "h200"), ("v100-16bg", "v100-16gb")],
)
def test_the_closest_name_is_suggested(word: str, meant: str) -> None:
    assert did_you_mean(word, CARDS) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize("word", ["", "tpu", "zzzz"])
def test_nothing_is_suggested_when_nothing_is_close(word: str) -> None:
    assert did_you_mean(word, CARDS) == ""
