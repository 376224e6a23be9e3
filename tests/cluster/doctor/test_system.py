"""Building DeepSpeed's ops ahead of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cluster.doctor.system import main, needed_ops
from llmscale.config.deepspeed.resolve import parse_ds_config
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("zero", "ops"),
    [
        ({"stage": 2}, ()),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, ()),
        ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, ("pin_memory", "async_io")),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, ("pin_memory", "async_io")),
    ],
)
def test_ops_that_a_config_needs(zero: dict[str, object], ops: tuple[str, ...]) -> None:
    assert needed_ops(parse_ds_config({"zero_optimization": zero}, "ds.json")) == ops


def test_locks_are_removed_without_building(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    assert main(["--remove-lock", str(lock), "--remove-lock", str(tmp_path / "gone")]) == 0
    assert not lock.exists()


def test_an_unknown_op_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fused_adam"])
    assert "pin_memory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_an_op_is_really_built(tmp_path: Path) -> None:
    """The smaller of the two, into an empty cache with the lock of a build that died."""
    lock = tmp_path / "pin_memory" / "lock"
    lock.parent.mkdir()
    lock.touch()
    done = subprocess.run(
        [sys.executable, "-m", "llmscale.cluster.doctor.system", "pin_memory", "--remove-lock", str(lock)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_EXTENSIONS_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "pin_memory built in" in done.stdout
    assert (tmp_path / "pin_memory" / "pin_memory.so").exists()
