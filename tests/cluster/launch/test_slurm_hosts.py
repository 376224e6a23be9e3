"""The hosts of a Slurm job, from a stand-in for scontrol."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.slurm_hosts import slurm_hosts
from llmscale.errors import ConfigError


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
