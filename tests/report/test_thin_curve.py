from __future__ import annotations

import math

import numpy as np

from llmscale.report.charts import spread, thin


def test_few_values_are_all_kept() -> None:
    assert thin([3.0, 1.0, 2.0], 3).tolist() == [0, 1, 2]


def test_no_spike_and_no_gap_is_lost() -> None:
    values = np.sin(np.arange(100_000) / 5000)
    values[31_337], values[64_001], values[77_777] = 9.0, -9.0, math.nan
    indices = thin(values, 2000)
    assert {0, 31_337, 64_001, 77_777, 99_999} <= set(indices.tolist())
    assert len(indices) <= 2003
    assert (np.diff(indices) > 0).all()


def test_nothing_but_gaps() -> None:
    indices = thin([math.nan] * 5000, 100)
    assert indices[0] == 0 and indices[-1] == 4999 and len(indices) < 300


def test_even_indices_hold_both_ends() -> None:
    assert spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    indices = spread(1_000, 10)
    assert indices[0] == 0 and indices[-1] == 999 and len(indices) == 10
