"""`llmscale train` before it has ranks: what it says, and what it takes for its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cli.train import _split_flags
from tests.conftest import HANG_S, REPOSITORY


@pytest.mark.parametrize(
    ("words", "asked", "rest"),
    [
        (["--steps", "3"], None, ["--steps", "3"]),
        (["--nproc-per-node", "2", "--steps", "3"], 2, ["--steps", "3"]),
        (["--run", "a b", "--num_gpus=4"], 4, ["--run", "a b"]),
        (["--", "--nproc_per_node", "8", "--ds", "x.json"], 8, ["--ds", "x.json"]),
    ],
)
def test_its_own_flag_is_taken_out(words: list[str], asked: int | None, rest: list[str]) -> None:
    assert _split_flags(words) == (asked, rest)


def test_one_rank_in_a_folder_with_spaces_from_elsewhere(tiny_set: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    command = [sys.executable, "-m", "llmscale", "train", "--data", str(tiny_set), "--model", "tiny-1m"]
    command += ["--ds", str(REPOSITORY / "ds_configs" / "zero1.json"), "--n-layer", "1", "--n-head", "1"]
    command += ["--n-embd", "16", "--steps", "2", "--global-batch-size", "2", "--run", "my run"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == ["model", "data", "run", "folder"]
    assert lines[4].startswith("step      1/2 | loss ")
    assert lines[-1] == "finished at step 2 of 2; run folder: my run"
    # A slow machine announces phases that last.
    assert [line for line in done.stderr.splitlines() if not re.search(r" \.\.\.$|^still ", line)] == [], "noise"
    described = (folder / "my run" / "start.txt").read_text()
    assert all(f"{topic}: " in described for topic in ("engine", "batch", "optimizer", "memory", "start-up"))
