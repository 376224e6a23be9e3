from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmscale.cluster.remote import PACKAGE, gather_environment, parse_env_file
from llmscale.errors import ConfigError

ROOT = PACKAGE.parent


def gather(variables: dict[str, str], extra: tuple[str, ...] = (), files: tuple[Path, ...] = ()) -> dict[str, str]:
    return gather_environment(variables, extra=extra, env_files=files)


@pytest.mark.parametrize(
    "name",
    [
        *("DS_ACCELERATOR", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OMP_NUM_THREADS", "NCCL_DEBUG"),
        *("GLOO_SOCKET_IFNAME", "CUDA_HOME", "PYTHONHASHSEED", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_EXTENSIONS_DIR"),
        *("AWS_ACCESS_KEY_ID", "LD_LIBRARY_PATH", "CC", "MAX_JOBS", "https_proxy", "TP_SOCKET_IFNAME"),
    ],
)
def test_what_training_needs_goes_along_unchanged(name: str) -> None:
    assert gather({name: "a b; $(c) 'd'"})[name] == "a b; $(c) 'd'"


@pytest.mark.parametrize(
    "name",
    [
        *("HOME", "SSH_CONNECTION", "RANK", "WORLD_SIZE", "MASTER_ADDR", "HOSTNAME", "CUDA_VISIBLE_DEVICES", "TERM"),
        *("LLMSCALE_WATCH", "CCACHE_DIR", "SLURM_JOB_ID"),
    ],
)
def test_what_belongs_to_one_host_or_shell_stays(name: str) -> None:
    assert name not in gather({name: "x"})


def test_this_llmscale_and_this_python_come_first() -> None:
    chosen = gather({"PYTHONPATH": "/more", "PATH": "/usr/bin"})
    assert chosen["PYTHONPATH"] == f"{ROOT}:/more"
    assert chosen["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_shell(tmp_path: Path) -> None:
    file = tmp_path / ".deepspeed_env"
    file.write_text("# tuning\n\nNCCL_DEBUG=INFO\nexport NCCL_ALGO=Ring=x\n MINE = a b \n")
    assert parse_env_file(file) == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring=x", "MINE": "a b"}
    chosen = gather(
        {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree", "OTHER": "o"}, ("NCCL_DEBUG=TRACE", "OTHER", "EMPTY="), (file,)
    )
    assert {name: chosen[name] for name in ("NCCL_DEBUG", "NCCL_ALGO", "MINE", "OTHER", "EMPTY")} == {
        "NCCL_DEBUG": "TRACE",
        "NCCL_ALGO": "Ring=x",
        "MINE": "a b",
        "OTHER": "o",
        "EMPTY": "",
    }


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this shell has no such variable"):
        gather({}, ("MISSING",))
    with pytest.raises(ConfigError, match="is not NAME or NAME=VALUE"):
        gather({}, ("a b=c",))
    (tmp_path / "bad").write_text("NCCL_DEBUG INFO\n")
    with pytest.raises(ConfigError, match="bad:1: 'NCCL_DEBUG INFO' is not NAME=VALUE"):
        parse_env_file(tmp_path / "bad")
