from __future__ import annotations

import pytest

from llmscale.planning.cost import energy_kwh, price_usd


def test_1024_a100s_for_33_days() -> None:
    assert price_usd(1024 * 33 * 24, 1.10) == pytest.approx(892e3, rel=0.001)


def test_energy_of_a_year_of_one_card() -> None:
    assert energy_kwh(365 * 24, 400, pue=1.5) == pytest.approx(5256)
