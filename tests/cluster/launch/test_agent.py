"""One agent per run and host, whatever other users do."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cluster.launch import agent
from llmscale.cluster.launch.agent import CLAIMS_NAME, claim_name, claim_run

CLAIM = """
import sys
from pathlib import Path
from llmscale.cluster.launch import agent
agent._PREDECESSOR_S = 0.3
claim = agent.claim_run(Path(sys.argv[1]))
print("claimed" if claim else "taken", flush=True)
sys.stdin.read()
"""


def start_claim(run: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_one_at_a_time_and_the_next_when_the_first_is_killed(tmp_path: Path) -> None:
    first, said = start_claim(tmp_path)
    assert said == "claimed"
    second, said = start_claim(tmp_path)
    assert said == "taken"
    other, said = start_claim(tmp_path / "another")
    assert said == "claimed"
    end(first, second, other)
    third, said = start_claim(tmp_path)
    assert said == "claimed"
    end(third)


def test_a_predecessor_that_still_ends_its_ranks_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = start_claim(tmp_path)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        end(first)

    monkeypatch.setattr(agent.time, "sleep", sleep)
    claim = claim_run(tmp_path)
    assert claim is not None
    assert len(sleeps) == 1
    claim.close()


def test_another_user_can_neither_be_first_nor_lock_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    # Names that anyone on the host can take are of no use to it.
    squatter = socket.socket(socket.AF_UNIX)
    squatter.bind(f"\0llmscale-agent-{claim_name()}")
    run = tmp_path / "run"
    run.mkdir()
    for folder in (run, *run.parents[: len(run.parents) - 2]):
        folder.chmod(0o755)
    claim = claim_run(run)
    assert claim is not None
    path = run / CLAIMS_NAME / claim_name()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    claim.close()
    code = """
import fcntl, os, sys
os.setgid(65534); os.setuid(65534)
own, new = sys.argv[1], sys.argv[1] + "-new"
for path, flags in ((own, os.O_RDONLY), (own, os.O_RDWR), (new, os.O_RDWR | os.O_CREAT)):
    try:
        fcntl.flock(os.open(path, flags), fcntl.LOCK_SH)
    except PermissionError:
        continue
    sys.exit(1)
"""
    assert subprocess.run([sys.executable, "-I", "-c", code, str(path)]).returncode == 0
    squatter.close()


def test_the_claim_is_of_this_host_alone() -> None:
    assert claim_name() == claim_name()
    assert claim_name().startswith(f"{socket.gethostname()}-")
