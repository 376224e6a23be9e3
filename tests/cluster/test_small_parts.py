"""Ports, process trees, Slurm's hosts, command lines: the small parts of the supervisor."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmscale.cluster.extension_locks import HeldLocks, remove_stale_locks
from llmscale.cluster.free_port import find_port, is_free
from llmscale.cluster.hostfile import Host
from llmscale.cluster.messages import Start
from llmscale.cluster.process_tree import descendants, kill_descendants, process_state
from llmscale.cluster.reach import choose_reach, pdsh_command
from llmscale.cluster.restart_arguments import restart_arguments
from llmscale.cluster.slurm_hosts import slurm_hosts
from llmscale.cluster.starter import starter_command
from llmscale.config.parse import parse_run_config
from llmscale.errors import ConfigError


def test_a_wanted_port_is_kept_when_it_is_free_and_replaced_when_it_is_taken() -> None:
    port, was_taken = find_port(None)
    assert not was_taken
    assert find_port(port) == (port, False)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        other, was_taken = find_port(port)
        assert was_taken
        assert other != port
    assert not is_free(99_999)


def test_a_tree_is_ended_by_its_numbers_and_the_spared_stay() -> None:
    script = "sleep 100 & sleep 100 & setsid sleep 100 & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        while len(descendants(shell.pid)) < 3:
            time.sleep(0.01)
        children = descendants(shell.pid)
        assert kill_descendants(shell.pid, spare=children[:1]) == 2
        assert process_state(children[0]) == "S"
        assert [state for state in map(process_state, children[1:]) if state not in ("", "Z")] == []
        assert kill_descendants(shell.pid) == 1
    assert process_state(shell.pid) == ""


def test_stale_locks_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = time.time() - 3600
    for name in ("dead", "held", "young"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        if name != "young":
            os.utime(tmp_path / name / "lock", (old, old))
    with (tmp_path / "held" / "lock").open():
        assert remove_stale_locks() == [str(tmp_path / "dead" / "lock")]


def test_a_lock_that_was_held_goes_and_a_successor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("killed", "taken_anew"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    held = HeldLocks()
    with (tmp_path / "killed" / "lock").open(), (tmp_path / "taken_anew" / "lock").open():
        held.note([os.getpid()])
    (tmp_path / "taken_anew" / "lock").unlink()
    (tmp_path / "taken_anew" / "new").touch()
    (tmp_path / "taken_anew" / "new").rename(tmp_path / "taken_anew" / "lock")
    assert held.remove() == [str(tmp_path / "killed" / "lock")]
    assert (tmp_path / "taken_anew" / "lock").exists()


def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, 2),
        ({}, 1),
    ],
)
def test_hosts_of_a_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], slots: int
) -> None:
    fake_scontrol(tmp_path, monkeypatch, '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]", **variables}) == (Host("n1", slots), Host("n2", slots))
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}, slots=3)[0].slots == 3


def test_outside_of_a_slurm_job_there_are_no_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        slurm_hosts({})
    fake_scontrol(tmp_path, monkeypatch, "echo down >&2; exit 1")
    with pytest.raises(ConfigError, match="down"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n1"})


def test_ways_to_a_host() -> None:
    for launcher, first in (("ssh", "ssh"), ("pdsh", "env"), ("slurm", "srun")):
        argv = choose_reach(launcher, 1234)(Host("node-9.invalid", 1)).argv
        assert argv[0] == first
        assert any("llmscale.cluster.agent" in word for word in argv)
    assert choose_reach("ssh", None)(Host("localhost", 1)).token is None
    tokens = {choose_reach("pdsh", 1234)(Host("node-9.invalid", 1)).token for _ in range(2)}
    assert len(tokens) == 2
    assert None not in tokens


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_pdsh_replaces_nothing_in_what_it_runs() -> None:
    written = pdsh_command("localhost", ["%h", "100%"])[-1]
    done = subprocess.run(["pdsh", "-R", "exec", "-N", "-w", "localhost", "echo", written], **CAPTURE)
    assert done.stdout == "%h 100%\n"


CAPTURE = {"capture_output": True, "text": True}


@pytest.mark.parametrize("starter", ["deepspeed", "torchrun"])
def test_starters_hand_over_every_argument_unchanged(tmp_path: Path, starter: str) -> None:
    """The real launchers, a stand-in for train.py, and flags that the launchers know themselves."""
    pytest.importorskip("deepspeed")
    script = tmp_path / "a script.py"
    script.write_text("import os, sys, json; print(json.dumps([os.environ['RANK'], sys.argv[1:]]))")
    arguments = ["--run", "a b", "--help", "$(x)", "", "--master_port", "*", "--nnodes=3", "-m"]
    start = Start(starter, ["here"], 0, 1, "127.0.0.1", find_port(None)[0], str(script), arguments, "")
    done = subprocess.run(starter_command(start), **CAPTURE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    heard = [line for line in done.stdout.splitlines() if line.startswith('["0"')]
    assert len(heard) == 1
    words = json.loads(heard[0])[1]
    assert [word for word in words if not word.startswith("--local_rank=")] == arguments


DATA = ["--data", "set", "--steps", "3"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["--resume", "auto"], ["--resume", "auto"]),
        (["--resume", "none"], ["--resume", "auto"]),
        (["--resume=runs/x/checkpoints/step-3"], ["--resume", "new"]),
        (["--init-from", "other"], ["--resume", "auto", "--init-from", "null"]),
        (["--init_from=other", "--seed", "4"], ["--seed", "4", "--resume", "auto", "--init-from", "null"]),
    ],
)
def test_a_restart_goes_on_and_does_not_begin_again(given: list[str], expected: list[str]) -> None:
    arguments = [*DATA, *given]
    restarted = restart_arguments(arguments, parse_run_config(arguments), Path("new"))
    assert restarted == [*DATA, *expected]
    config = parse_run_config(restarted)
    assert config.init_from is None
    assert config.resume in ("auto", "new")
    assert restart_arguments(arguments, parse_run_config(arguments), None) == arguments


def test_a_run_file_that_begins_from_weights_is_overruled(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("init_from: other\nsteps: 3\n")
    arguments = ["--config", str(file)]
    restarted = restart_arguments(arguments, parse_run_config(arguments), Path("new"))
    assert parse_run_config(restarted).init_from is None


def test_the_agent_answers_without_torch() -> None:
    code = "import llmscale.cluster.agent, llmscale.cli.launch, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
