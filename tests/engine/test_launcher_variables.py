from __future__ import annotations

import os

import pytest

from llmscale.engine import launcher_variables
from llmscale.engine.launcher_variables import check_is_only_copy
from llmscale.errors import ConfigError

SRUN = {"SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("variables", "numbered_by", "words"),
    [
        (SRUN, "SLURM_PROCID", "is 4: srun started as many copies of `llmscale train`.*srun --ntasks=1"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "is 2: mpirun started"),
        ({"PMI_SIZE": "2"}, "PMI_RANK", "PMI_SIZE is 2: mpirun started"),
        ({"WORLD_SIZE": "1"}, "LOCAL_RANK", "LOCAL_RANK is set.*Give the launcher llmscale/train.py"),
    ],
)
def test_of_many_copies_the_first_says_why_none_starts(
    variables: dict[str, str], numbered_by: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_variables, "_FIRST_SPEAKS_S", 0.0)
    with pytest.raises(ConfigError, match=words):
        check_is_only_copy({**variables, numbered_by: "0"}, "llmscale train")
    with pytest.raises(SystemExit) as silent:
        check_is_only_copy({**variables, numbered_by: "1"}, "llmscale train")
    assert silent.value.code == 2


@pytest.mark.parametrize("rank", ["0", "1"])
def test_copies_on_other_hosts_say_it_too(rank: str) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is set: a launcher started this.*unset WORLD_SIZE"):
        check_is_only_copy({"WORLD_SIZE": "2", "RANK": rank}, "llmscale train")


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "4"},
        # srun called within that shell: the task is this process.
        {**SRUN, "SLURM_TASK_PID": str(os.getpid())},
    ],
)
def test_a_shell_of_srun_excuses_no_other_launcher(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        check_is_only_copy({**variables, "SLURM_PTY_PORT": "40000"}, "llmscale train")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # A job script with room for four, and a shell by `srun --pty`.
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40000", "SLURM_TASK_PID": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        # A container of one, as operators of clusters set it up.
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_one_copy_may_start_ranks(variables: dict[str, str]) -> None:
    check_is_only_copy(variables, "llmscale train")
