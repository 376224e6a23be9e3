"""Nothing of a run lies in /dev/shm: not while it trains, so a container's 64 MB are enough, and not after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import shared_memory_segments
from tests.distributed.test_full_disk import read_until


@pytest.mark.slow
def test_two_runs_side_by_side_use_no_shared_memory_and_survive_a_kill(
    ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    before = shared_memory_segments()
    flags = ("--steps", "100000", "--log-every", "20", "--num-workers", "1", "--save-every", "0")
    jobs = [ranks(train_command(*flags, "--run", str(tmp_path / name)), 2) for name in ("one", "two")]
    for job in jobs:
        read_until(job, "step     20/")
    assert shared_memory_segments() <= before
    os.killpg(jobs[0].processes[0].pid, signal.SIGKILL)
    jobs[0].kill()
    jobs[1].send(signal.SIGTERM)
    jobs[1].wait()
    assert jobs[1].exit_codes == [0, 0]
    again = ranks(train_command("--steps", "30", "--num-workers", "1", "--run", str(tmp_path / "one")), 2)
    output = again.wait()[0]
    assert again.exit_codes == [0, 0], output
    assert shared_memory_segments() <= before
