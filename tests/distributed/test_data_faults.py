"""What Streaming would pass over in silence ends a run with one clear error on every rank, soon and without a hang."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import flip_a_bit, read_losses, run_ranks
from tests.distributed.test_full_disk import read_until


@pytest.fixture
def own_set(tiny_set: Path, tmp_path: Path) -> Path:
    """A copy of the tiny set that a test may damage."""
    return Path(shutil.copytree(tiny_set, tmp_path / "set"))


def shard_of(folder: Path, split: str) -> Path:
    (shard,) = (folder / split).glob("*.mds")
    return shard


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (Path.unlink, "missing"),
        (flip_a_bit, "was altered"),
    ],
)
def test_a_damaged_set_ends_the_start(
    train_command: Callable,
    own_set: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    text: str,
) -> None:
    shard = shard_of(own_set, "train")
    damage(shard)
    output = run_ranks(train_command("--steps", "5", "--data", str(own_set), "--num-workers", "1"), 2, expect=2)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert shard.name in errors[0]
    assert text in errors[0]
    # What only reading finds is found by the first step, when the run has begun.
    assert (tmp_path / "run").exists() == (text == "was altered"), "no folder is left that holds only a lock"


def test_a_shard_that_is_cut_in_mid_run_ends_it_on_every_rank(
    ranks: Callable, train_command: Callable, own_set: Path
) -> None:
    flags = ("--steps", "100000", "--log-every", "20", "--val-every", "20", "--data", str(own_set))
    job = ranks(train_command(*flags), 2)
    read_until(job, "step     20/")
    os.truncate(shard_of(own_set, "val"), 100)
    outputs = job.wait()
    assert job.exit_codes == [2, 2], outputs
    assert "error: " in outputs[0]
    assert "val/shard.00000.mds" in outputs[0]


def replace(path: Path) -> None:
    (path.parent / "new").write_bytes(bytes(1000))
    os.replace(path.parent / "new", path)


@pytest.mark.slow
@pytest.mark.parametrize("change", [Path.unlink, replace])
def test_a_shard_that_is_removed_or_replaced_in_mid_run_is_read_on(
    ranks: Callable, train_command: Callable, own_set: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The open file keeps its bytes, whatever has its name."""
    losses = []
    for number in range(2):
        flags = ("--steps", "100", "--log-every", "20", "--data", str(own_set), "--run", str(tmp_path / f"run{number}"))
        job = ranks(train_command(*flags), 2)
        read_until(job, "step     20/")
        if number:
            change(shard_of(own_set, "train"))
        job.wait()
        assert job.exit_codes == [0, 0]
        losses.append(read_losses(tmp_path / f"run{number}"))
    assert losses[0] == losses[1] and len(losses[0]) >= 5


#: train.py whose feed fails on rank 1, at the third step, in a way that nobody foresaw.
_BREAKS = """
import os, sys
from llmscale.data.loader import Feed
from llmscale.train import main

read, micro_batches = Feed.__next__, []

def fail_in_step_3(feed):
    micro_batches.append(read(feed))
    if os.environ["RANK"] == "1" and len(micro_batches) > 2 * feed.plan.gradient_accumulation_steps:
        raise FileNotFoundError("stale handle")
    return micro_batches[-1]

Feed.__next__ = fail_in_step_3
status = main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""


def test_what_nobody_foresaw_on_one_rank_ends_the_others_with_one_line(
    ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    script = tmp_path / "breaks.py"
    script.write_text(_BREAKS)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    job = ranks([str(script), *train_command("--steps", "5", "--log-every", "1")[1:]], 2)
    first, second = job.wait()
    assert job.exit_codes == [1, 1], first + second
    assert "step      2/5" in first
    assert first.splitlines()[-1] == "error: unexpected FileNotFoundError: stale handle (rank 1)"
    assert "Traceback" not in first
    assert "error: rank 1: unexpected FileNotFoundError: stale handle. The traceback is in " in second
    (traceback,) = (tmp_path / "run" / "logs").iterdir()
    assert "fail_in_step_3" in traceback.read_text()


def test_a_killed_rank_does_not_leave_the_other_waiting(ranks: Callable, train_command: Callable) -> None:
    job = ranks(train_command("--steps", "100000", "--log-every", "20"), 2)
    read_until(job, "step     20/")
    job.processes[1].kill()
    job.wait()
    assert job.exit_codes[0] not in (0, None)
