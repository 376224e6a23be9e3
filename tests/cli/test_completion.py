"""The scripts, in the shells that they are for."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli.main import COMMANDS, main
from llmscale.config.bundled_files import DS_CONFIGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a file and a folder to complete."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "zero_mine.json").write_text("{}")
    (folder / "runs" / "a").mkdir(parents=True)
    return folder


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], list[str]]:
    """`complete("data pre")`: what bash would offer for the last word."""
    (folder / "script").write_text(script_for("bash", capsys))

    def ask(line: str) -> list[str]:
        words = ["llmscale", *line.split(" ")]
        code = f"""
source ./script
COMP_WORDS=({" ".join(shlex.quote(word) for word in words)}); COMP_CWORD={len(words) - 1}
_shtab_llmscale
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        done = subprocess.run(["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    return ask


def test_bash_completes_commands_flags_names_and_paths(complete: Callable[[str], list[str]]) -> None:
    assert complete("") == [*COMMANDS]
    assert complete("data pre") == ["prepare"]
    assert complete("data prepare --enc") == ["--encoder"]
    assert complete("data prepare --encoder ") == ["auto", "gigatoken", "reference"]
    assert complete("train --sched") == ["--schedule"]
    assert complete("train --schedule w") == ["wsd"]
    assert "gpt2-124m" in complete("plan --model gpt2")
    assert complete("estimate --gpu h200") == ["h200"]
    assert complete("estimate --ds zero3_c") == ["zero3_ckpt", "zero3_ckpt_cpu"]
    assert complete("train --ds zero") == [*DS_CONFIGS.names(), "zero_mine.json"]
    assert complete("sample runs/") == ["runs/a"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_takes_the_script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = folder / f"llmscale.{shell}"
    path.write_text(script_for(shell, capsys))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (folder / "script.fish").write_text(script_for("fish", capsys))
    code = "source script.fish; complete -C 'llmscale data prepare --encoder '"
    done = subprocess.run(["fish", "-N", "-c", code], cwd=folder, capture_output=True, text=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["auto", "gigatoken", "reference"]
