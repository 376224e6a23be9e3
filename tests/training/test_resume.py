from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmscale.engine.train_step import get_scaler_state
from llmscale.training import resume


@pytest.mark.parametrize(("saved", "expected"), [(None, 2.0**16), ({"cur_scale": 512.0}, 512.0)])
def test_a_checkpoint_without_a_scaler_brings_back_the_configured_one(
    saved: dict[str, float] | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that went from bf16 to fp16 and now goes back to a checkpoint that bf16 wrote."""
    monkeypatch.setattr(resume, "load_engine", lambda *_: None)
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(cur_scale=2.0**16))
    engine: Any = SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: True, dynamic_loss_scale=lambda: True)
    configured = get_scaler_state(engine)
    optimizer.loss_scaler.cur_scale = 1.0
    source: Any = SimpleNamespace(path=Path("step-1"), state=SimpleNamespace(loss_scaler=saved))
    world: Any = SimpleNamespace(control=None, disks=None)
    resume.load_checkpoint(engine, source, world, configured)
    assert optimizer.loss_scaler.cur_scale == expected
