from __future__ import annotations

from llmscale.training.loss_scale_history import LossScaleHistory


def history(*scales: float | None) -> LossScaleHistory:
    found = LossScaleHistory()
    for step, scale in enumerate(scales, 1):
        found.add(step, scale)
    return found


def test_only_changes_are_remembered() -> None:
    assert history(8.0, 8.0, 4.0, 4.0, 8.0).changes == [(1, 8.0), (3, 4.0), (5, 8.0)]
    assert history(None, None).changes == []
    assert len(history(*(float(step) for step in range(100))).changes) == 24


def test_a_collapse_is_low_and_a_fall() -> None:
    assert not history().has_collapsed
    assert not history(65536.0, 32768.0, 1024.0).has_collapsed
    assert history(65536.0, 1024.0, 16.0).has_collapsed
    assert not history(8.0, 4.0).has_collapsed, "it was low from the start"
    assert not history(65536.0, 16.0, 1024.0).has_collapsed, "it has recovered"


def test_it_is_said_in_one_line() -> None:
    assert history(64.0, 32.0).describe() == "loss scale 64 (step 1) -> 32 (step 2)"
