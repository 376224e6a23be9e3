"""One small trained run for all commands that look at runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm_start

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def trained_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 2 and 3, by one rank. Do not change it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    warm_start.run(
        [
            *(sys.executable, "llmscale/train.py", "--data", str(tiny_set), "--run", str(run), "--model", "tiny-1m"),
            *("--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--global-batch-size", "4", "--steps", "3"),
            *("--save-every", "2", "--val-every", "0", "--num-workers", "0"),
        ],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    return run


@pytest.fixture
def llmscale(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`llmscale(*words)` runs the command; with `torch_free=True` where importing torch ends the process."""

    def run(*words: str, torch_free: bool = False) -> subprocess.CompletedProcess[str]:
        path = [str(REPOSITORY)]
        if torch_free:
            (tmp_path / "blocked" / "torch").mkdir(parents=True, exist_ok=True)
            (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
            path.insert(0, str(tmp_path / "blocked"))
        return warm_start.run(
            [sys.executable, "-m", "llmscale.cli.main", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run
