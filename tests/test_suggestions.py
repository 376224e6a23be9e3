"""Values of files in messages are bounded, whatever they hold."""

from __future__ import annotations

import pytest

from llmscale.suggestions import shown

NESTED: list[object] = ["x"]
for _ in range(60):
    # As YAML's aliases make them: each list holds the one before nine times, and 9^60 entries cannot be written.
    NESTED = [NESTED] * 9


@pytest.mark.parametrize(
    "value",
    [NESTED, {"a": NESTED}, "x" * 10**7, 10**5000, [1] * 10**6, {str(i): i for i in range(10**5)}, b"x" * 10**6],
    ids=["nested", "mapping", "text", "number", "list", "keys", "bytes"],
)
def test_values_without_end(value: object) -> None:
    assert len(shown(value)) <= 83


@pytest.mark.parametrize("value", ["a", "", 1, 1.5, None, True, [1, "a"], {"a": 1}])
def test_short_values_are_complete(value: object) -> None:
    assert shown(value) == repr(value)
