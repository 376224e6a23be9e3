"""A disk that fills under a run: training goes on, says so, loses nothing that memory can hold, and is honest at the
end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.conftest import read_records

#: A checkpoint asks for 64 MiB of spare room.
DISK_BYTES = 80 << 20


class Ballast:
    """A file that takes all there is."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def fill(self) -> None:
        with open(self._path, "wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        self._path.unlink()


def read_until(job, text: str, rank: int = 0) -> str:
    """What a rank printed up to a line with `text`; fails when it ends before."""
    seen = []
    for line in job.processes[rank].stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    raise AssertionError("".join(seen))


def test_metrics_and_records_outlive_a_full_disk(
    ranks: Callable, train_command: Callable, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(DISK_BYTES)
    run, ballast = disk / "run", Ballast(disk)
    job = ranks(train_command("--steps", "1000000", "--global-batch-size", "128", "--run", str(run)), 2)
    read_until(job, "step      5/")
    ballast.fill()
    read_until(job, "metrics.jsonl cannot be written: No space left on device. Training continues")
    size = (run / "metrics.jsonl").stat().st_size
    ballast.free()
    while (run / "metrics.jsonl").stat().st_size == size:
        time.sleep(0.02)
    ballast.fill()
    read_until(job, "metrics.jsonl cannot be written")
    step = int(read_until(job, "step ").splitlines()[-1].split("step")[1].split("/")[0])
    read_until(job, f"step {step + 10:>6}/")
    job.send(signal.SIGTERM)
    outputs = job.wait()
    assert job.exit_codes == [2, 2], "its last checkpoint could not be saved"
    assert "NOT saved" in outputs[0]
    assert "metrics.jsonl lacks records that the disk refused: " in outputs[0]
    logged = [record["step"] for record in read_records(run, "train")]
    assert logged == list(range(1, len(logged) + 1)), "whole lines, without a gap before the second outage"


def test_a_run_that_cannot_begin_leaves_nothing_behind(
    ranks: Callable, train_command: Callable, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(1 << 20)
    Ballast(disk).fill()
    job = ranks(train_command("--steps", "5", "--run", str(disk / "runs" / "new")), 2)
    outputs = job.wait()
    assert job.exit_codes == [2, 2], outputs
    (error,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
    assert "runs/new cannot be written to: No space left on device" in error
    assert os.listdir(disk) == ["ballast"]
