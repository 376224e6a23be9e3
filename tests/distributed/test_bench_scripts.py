"""The two scripts that show what resuming is worth. All are slow; the quickest take half a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * 3600)]


def run_script(name: str, flags: str) -> str:
    """Run a script of scripts/bench; its output. A failed check in it is a failed test."""
    command = [sys.executable, "-m", f"scripts.bench.resume.{name}", *words(flags)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_fault_of_each_kind() -> None:
    """One of two ranks that divide a sequence in training, one of three in a save, three in a start."""
    output = run_script("chaos", "--faults 3 --seed 23598")
    faults = [line for line in output.splitlines() if " died at step " in line]
    assert [line.split()[1:5] for line in faults] == [
        ["zero3", "x2/2/1", "one", "training"],
        ["zero3_offload", "x3/1/1", "one", "saving"],
        ["zero1", "x3/1/1", "all", "start-up"],
    ]
    assert "all 120 steps consumed exactly the untouched run's" in output
    assert "no finished one was ever damaged" in output


@pytest.mark.parametrize(
    ("flags", "num_steps"),
    [
        ("--faults 50 --seed 1", 2000),
        # Routers' choices flip by rounding, so losses differ by more than those of dense models (docs/models.md).
        ("--faults 5 --seed 1 --block experts --tolerance 1e-2", 200),
    ],
)
def test_many_faults(flags: str, num_steps: int) -> None:
    assert f"all {num_steps} steps consumed" in run_script("chaos", flags)


@pytest.mark.parametrize(
    "flags",
    [
        # At one world size: test_resume.py goes from each to another.
        "--block gpt2 --configs zero1,zero3_offload --worlds 2 --steps 5",
        "--block llama --configs zero1,zero3_offload --worlds 2 --steps 5",
        "--block experts --configs zero1,zero3_offload --worlds 2 --steps 5",
        "--precision fp32 --tolerance 1e-5",
        "--precision bf16 --tolerance 2e-3",
        "--block llama --worlds 1,2 --configs zero0,zero1,zero2,zero2_offload,zero3,zero3_offload",
        "--block llama --worlds 1,2x2,4x2 --configs zero0,zero1,zero2,zero3_offload --steps 10",
        # At another world size dropout draws other numbers.
        "--worlds 2 --configs zero1,zero3 --dropout 0.1",
        "--block experts --worlds 1,2,4x2,4x1x2 --configs zero1,zero2_offload,zero3 --steps 10",
    ],
)
def test_the_resume_matrix(flags: str) -> None:
    assert "all bit-equal" in run_script("resume_matrix", flags)
