"""How the agent is started on a host."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.reach import choose_reach, pdsh_command


def test_ways_to_a_host() -> None:
    for launcher, first in (("ssh", "ssh"), ("pdsh", "env"), ("slurm", "srun")):
        argv = choose_reach(launcher, 1234)(Host("node-9.invalid", 1)).argv
        assert argv[0] == first
        assert any("llmscale.cluster.launch.agent" in word for word in argv)
    assert choose_reach("ssh", None)(Host("localhost", 1)).token is None
    tokens = {choose_reach("pdsh", 1234)(Host("node-9.invalid", 1)).token for _ in range(2)}
    assert len(tokens) == 2
    assert None not in tokens


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_pdsh_replaces_nothing_in_what_it_runs() -> None:
    written = pdsh_command("localhost", ["%h", "100%"])[-1]
    done = subprocess.run(
        ["pdsh", "-R", "exec", "-N", "-w", "localhost", "echo", written], capture_output=True, text=True
    )
    assert done.stdout == "%h 100%\n"


def test_the_agent_answers_without_torch() -> None:
    code = "import llmscale.cluster.launch.agent, llmscale.cli.launch, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])
