"""Liger Kernel's loss beside torch's, by Triton's interpreter: without a GPU its numbers are all that shows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.model.loss import check_fused_loss

has_liger = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
needs_liger = pytest.mark.skipif(not has_liger, reason="needs llmscale[liger] and Triton")


@needs_liger
def test_loss_and_gradients_are_as_exact_as_torchs() -> None:
    job = Path(__file__).with_name("fused_loss_job.py")
    # Triton decides when its modules are imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(job.parents[2])}
    run = subprocess.run([sys.executable, str(job)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    cases = json.loads(run.stdout.splitlines()[-1])
    assert len(cases) == 18
    for case, errors in cases.items():
        for fused, plain in errors:
            assert fused <= max(1.5 * plain, 1e-6), case


@needs_liger
def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="runs on GPUs, and this run on cpu"):
        check_fused_loss("cpu")


def test_without_liger_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", None)
    with pytest.raises(ConfigError, match=r"pip install -e .*\[liger\]"):
        check_fused_loss("cuda")
