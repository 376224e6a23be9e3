from __future__ import annotations

import pytest

from llmscale.planning.law_table import central, law_rows
from llmscale.planning.scaling_laws import Interval


def test_each_law_spends_the_same_budget() -> None:
    for row in law_rows(1e22):
        assert 6 * central(row.num_parameters) * central(row.tokens) == pytest.approx(1e22)
        assert row.source


def test_only_the_refit_has_ranges_and_kaplans_loss_is_not_compared() -> None:
    refit, original, _, kaplan = law_rows(1e22)
    assert isinstance(refit.num_parameters, Interval) and isinstance(refit.tokens, Interval)
    assert isinstance(original.num_parameters, float) and isinstance(original.loss, float)
    assert kaplan.loss is None
