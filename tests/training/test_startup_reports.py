from __future__ import annotations

import pytest

from llmscale.training.startup_reports import hpz_warnings


@pytest.mark.parametrize(
    ("group", "ranks_per_node", "words"),
    [(1, [4], None), (4, [4, 4], None), (2, [4, 4], None), (4, [4], "on one node"), (4, [2, 2], "nodes of 2 ranks")],
)
def test_groups_that_gain_nothing_are_said(group: int, ranks_per_node: list[int], words: str | None) -> None:
    found = list(hpz_warnings(group, ranks_per_node))
    assert len(found) == (words is not None)
    assert all(words in warning for warning in found if words)
