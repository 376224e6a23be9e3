"""The two scripts that show what resuming is worth. All are slow; the quickest take half a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


def run_script(name: str, *flags: str) -> str:
    """Run a script of scripts/bench; its output. A failed check in it is a failed test."""
    result = subprocess.run(
        [sys.executable, "-m", f"scripts.bench.resume.{name}", *flags],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_fault_of_each_kind() -> None:
    """One of two ranks that divide a sequence in training, one of three in a save, three in a start."""
    output = run_script("chaos", "--faults", "3", "--seed", "23598")
    faults = [line for line in output.splitlines() if " died at step " in line]
    assert [line.split()[1:5] for line in faults] == [
        ["zero3", "x2/2/1", "one", "training"],
        ["zero3_offload", "x3/1/1", "one", "saving"],
        ["zero1", "x3/1/1", "all", "start-up"],
    ]
    assert "all 120 steps consumed exactly the untouched run's" in output
    assert "no finished one was ever damaged" in output


@pytest.mark.slow
@pytest.mark.parametrize("block", ["gpt2", "llama", "experts"])
def test_a_part_of_the_resume_matrix(block: str) -> None:
    """At one world size: test_resume.py goes from each to another."""
    flags = ("--configs", "zero1,zero3_offload", "--worlds", "2", "--steps", "5")
    output = run_script("resume_matrix", "--block", block, *flags)
    assert "all bit-equal" in output


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", "1e-5"), ("bf16", "2e-3")])
def test_the_whole_resume_matrix(precision: str, tolerance: str) -> None:
    assert "all bit-equal" in run_script("resume_matrix", "--precision", precision, "--tolerance", tolerance)


@pytest.mark.slow
def test_the_matrix_of_todays_blocks() -> None:
    flags = ("--worlds", "1,2", "--configs", "zero0,zero1,zero2,zero2_offload,zero3,zero3_offload")
    assert "all bit-equal" in run_script("resume_matrix", "--block", "llama", *flags)


@pytest.mark.slow
def test_the_matrix_of_divided_sequences() -> None:
    flags = ("--worlds", "1,2x2,4x2", "--configs", "zero0,zero1,zero2,zero3_offload", "--steps", "10")
    assert "all bit-equal" in run_script("resume_matrix", "--block", "llama", *flags)


@pytest.mark.slow
def test_dropout_is_bit_equal_in_the_whole_matrix() -> None:
    """With dropout on, another world size draws other numbers, so only the same world size is compared."""
    output = run_script("resume_matrix", "--worlds", "2", "--configs", "zero1,zero3", "--dropout", "0.1")
    assert "all bit-equal" in output


@pytest.mark.slow
def test_the_matrix_of_experts() -> None:
    flags = ("--worlds", "1,2,4x2,4x1x2", "--configs", "zero1,zero2_offload,zero3", "--steps", "10")
    assert "all bit-equal" in run_script("resume_matrix", "--block", "experts", *flags)


@pytest.mark.slow
def test_fifty_faults() -> None:
    assert "all 2000 steps consumed" in run_script("chaos", "--faults", "50", "--seed", "1")


@pytest.mark.slow
def test_faults_of_a_run_with_experts() -> None:
    """Routers' choices flip by rounding, so losses differ by more than those of dense models (docs/models.md)."""
    words = ("--faults", "5", "--seed", "1", "--block", "experts", "--tolerance", "1e-2")
    assert "all 200 steps consumed" in run_script("chaos", *words)
