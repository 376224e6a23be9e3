"""The real launchers as starters."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from llmscale.cluster.launch.protocol import Start
from llmscale.cluster.launch.ranks import find_port, starter_command


@pytest.mark.parametrize("starter", ["deepspeed", "torchrun"])
def test_starters_hand_over_every_argument_unchanged(tmp_path: Path, starter: str) -> None:
    """The real launchers, a stand-in for train.py, and flags that the launchers know themselves."""
    pytest.importorskip("deepspeed")
    script = tmp_path / "a script.py"
    script.write_text("import os, sys, json; print(json.dumps([os.environ['RANK'], sys.argv[1:]]))")
    arguments = ["--run", "a b", "--help", "$(x)", "", "--master_port", "*", "--nnodes=3", "-m"]
    start = Start(starter, ["here"], 0, 1, "127.0.0.1", find_port(None)[0], str(script), arguments, "")
    done = subprocess.run(
        starter_command(start), capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    heard = [line for line in done.stdout.splitlines() if line.startswith('["0"')]
    assert len(heard) == 1
    words = json.loads(heard[0])[1]
    assert [word for word in words if not word.startswith("--local_rank=")] == arguments
