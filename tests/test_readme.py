"""README's commands run as printed in a fresh clone, and its predictions are those of `llmscale plan`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
#: They take an address, install packages, have a test of their own, or need the machines of a hostfile.
ELSEWHERE = re.compile(
    r"git clone |pip install |\./scripts/|deepspeed --hostfile |llmscale (?:doctor|launch) --hostfile "
)
NUM_TEXTS = 20
#: A small dataset in place of the demo's, which quickstart.sh trains on.
SMALL_DEMO = "llmscale data prepare --input my_texts --out data/python-stdlib --tokenizer bytes --seq-len 64"


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks() -> list[list[str]]:
    """Return the lines of every code block."""
    return [block.splitlines() for block in re.findall(r"^```\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)]


def commands() -> list[str]:
    """Return the commands of all blocks; in a block with prompts, the lines with one."""
    lines = []
    for block in blocks():
        prompted = [line.removeprefix("$ ") for line in block if line.startswith("$ ")]
        lines += prompted or block
    return lines


def runnable() -> list[str]:
    return [command for command in commands() if not ELSEWHERE.match(command)]


def plan(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a `llmscale plan` command prints."""
    assert main(command.split()[1:]) == 0
    return capsys.readouterr().out


def test_every_command_is_run_here_or_needs_other_machines() -> None:
    assert all(command.startswith("llmscale ") for command in runnable())
    names = {command.split()[1] for command in runnable()}
    assert names == {"plan", "estimate", "train", "runs", "report", "replay", "sample", "export"}


def test_plan_prints_the_comparison_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks() if block[0].startswith("$ llmscale plan ")]
    printed = plan(block[0].removeprefix("$ "), capsys).splitlines()
    assert block[1] == "..." and len(block) > 4
    assert [line for line in block[2:] if line not in printed] == []


def test_the_first_prediction_is_that_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "GPT-2 124M on 10B tokens: about 2 hours and $28 on 8 A100." in readme()
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^llmscale plan --model gpt2-124m .*$", page, re.MULTILINE)
    printed = plan(command, capsys)
    (hours,) = re.findall(r"^time +([\d.]+) hours", printed, re.MULTILINE)
    assert float(hours) == pytest.approx(2, abs=0.1)
    assert re.search(r"^cost +\$28 at", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_commands_run_in_a_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git here")
    clone = tmp_path / "llmscale"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    texts = clone / "my_texts"
    texts.mkdir()
    for number in range(NUM_TEXTS):
        sentence = f"The history of science, part {number}: "
        (texts / f"{number}.txt").write_text(sentence + "a quick brown fox jumps. " * 120)
    environment = {**os.environ, "PYTHONPATH": str(clone), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    printed = []
    for command in (SMALL_DEMO, *runnable()):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        printed.append(done.stdout)
    for words in ("finished at step", "validation loss", "The history of science", "Wrote exported", "ZeRO offload"):
        assert any(words in output for output in printed), words
    assert (clone / "report.html").stat().st_size > 50_000
    assert (clone / "exported" / "model.safetensors").exists()
