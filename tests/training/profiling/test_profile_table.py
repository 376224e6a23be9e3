from __future__ import annotations

from llmscale.training.profiling.profile_table import table_lines
from llmscale.training.profiling.trace_shares import PARTS, TraceShares

SHARES = TraceShares(2.0, {**dict.fromkeys(PARTS, 0.0), "matrix products": 1.5, "norms": 0.1, "idle": 0.4})


def test_every_part_has_a_line_and_unknown_predictions_a_dash() -> None:
    lines = list(table_lines(SHARES, 4, {}))
    assert [line.split("  ")[0] for line in lines[1:-1]] == list(PARTS)
    assert lines[1].split()[2:] == ["75.0%", "375.00", "-"]
    assert lines[-1].split() == ["a", "step", "100.0%", "500.00", "-"]


def test_predictions_stand_beside_their_part() -> None:
    lines = list(table_lines(SHARES, 4, {"matrix products": 0.3, "norms and other operations": 0.05}))
    by_name = {line[:18].strip(): line.split()[-1] for line in lines[1:-1]}
    assert by_name["matrix products"] == "300.00"
    assert (by_name["norms"], by_name["other operations"]) == ("-", "50.00")
    assert by_name["a step"] == "350.00"
