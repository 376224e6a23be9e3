"""Cells of gpu.py as processes, with stand-ins for what they run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.gpu.processes import (
    Enough,
    Step,
    Watched,
    cell_environment,
    nanogpt_options,
    read_train_steps,
    run_nanogpt,
    save_nanogpt_data,
    watch,
)
from scripts.bench.harness import REPOSITORY, python_environment, python_path, rank_environment

STAND_IN = """
import os, sys, time
assert "--dataset=bench" in sys.argv and os.path.getsize("data/bench/train.bin") == 2 * 6
print("step 0: train loss 1.0, val loss 1.0")
for number in range(10**9):
    print(f"iter {number}: loss 1.0000, time {50.5 if number else 9000}ms, mfu 1.00%")
    time.sleep(0.01)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Callable[..., Watched]:
    def run(program: str, limit_s: float = 60, steps: tuple[Step, ...] = ()) -> Watched:
        command = [sys.executable, "-c", program]
        return watch(command, tmp_path, tmp_path / "log", lambda: list(steps), Enough(1.0), limit_s, dict(os.environ))

    return run


def test_nanogpt_is_watched_and_ended(tmp_path: Path) -> None:
    theirs, place = tmp_path / "nanoGPT", tmp_path / "cell"
    theirs.mkdir()
    place.mkdir()
    (theirs / "train.py").write_text(STAND_IN)
    for name in ("model.py", "configurator.py"):
        (theirs / name).write_text("")
    save_nanogpt_data(np.arange(6).reshape(2, 3), place / "data" / "bench", 64)
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "seq_len": 4}
    options = nanogpt_options(device="cpu", compiled=False, **shape, micro_batch=2, micro_steps=1)
    actual = run_nanogpt(theirs, options, place, Enough(0.2), 60, cell_environment(tmp_path))
    assert actual.problem is None
    assert actual.steps[0].seconds == 9
    assert {step.seconds for step in actual.steps[1:]} == {0.0505}
    assert len(actual.steps) >= 3 + 4


def test_a_cell_without_memory_a_crash_and_a_late_one_are_told_apart(watched: Callable[..., Watched]) -> None:
    out = "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')"
    assert watched(out).problem == "out of memory"
    crash = watched("raise ValueError('of no use')").problem
    assert crash is not None and "ended with status 1: ValueError: of no use" in crash
    assert watched("pass").problem == "ended with status 0: it printed nothing"
    late = watched("import time; time.sleep(600)", limit_s=0.5, steps=(Step(1.0),)).problem
    assert late == "not done after 0 s, 1 steps"


def test_a_cells_children_end_with_it(watched: Callable[..., Watched], tmp_path: Path) -> None:
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); open('pid', 'w').write(str(p.pid)); "
    assert watched(child + "time.sleep(600)", limit_s=3).problem
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_folders_of_imports_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a bare machine what is missing may lie in a folder of PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/opt/wheels", str(REPOSITORY), "/opt/more"]))
    wanted = os.pathsep.join([str(REPOSITORY), "/opt/wheels", "/opt/more"])
    for environment in (cell_environment(tmp_path), python_environment(), rank_environment(0, 1, 29_700)):
        assert environment["PYTHONPATH"] == wanted
    assert python_path() == os.pathsep.join(["/opt/wheels", "/opt/more"])


def test_the_first_steps_do_not_count() -> None:
    enough = Enough(2.0)
    assert not enough.reached([Step(100.0)] * 4)
    assert not enough.reached([*[Step(100.0)] * 3, *[Step(0.5)] * 3])
    assert enough.reached([*[Step(100.0)] * 3, *[Step(0.5)] * 4])


def test_metrics_are_read_while_a_line_is_being_written(tmp_path: Path) -> None:
    record = {
        "kind": "train",
        "tokens_per_second": 256.0,
        "peak_memory_bytes": 7,
        "mfu": None,
        "forward_backward_s": 1.5,
    }
    lines = [json.dumps({"kind": "event", "event": "start"}), json.dumps(record), '{"kind": "tra']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_train_steps(tmp_path, 512) == [Step(2.0, 7, 1.5)]
    assert read_train_steps(tmp_path / "none", 512) == []
