"""The tutorial runs as it stands, and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: A block of commands, and the block of output after it if there is one.
STEP = re.compile(r"^```bash\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
END_OF_STEP = "-- end of step --"


def steps() -> list[tuple[str, str]]:
    """Return the tutorial's commands with the output that it shows."""
    return STEP.findall((ROOT / "docs" / "tutorial.md").read_text())


def shape(line: str) -> str:
    """Return a line with # for each number and one space for several."""
    return " ".join(re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line).split())


def find_missing(text: str, printed: str) -> list[str]:
    """Return the lines of `text` that `printed` lacks in this order. "..." ends a line or stands for lines."""
    missing, rest = [], [shape(line) for line in printed.splitlines()]
    for line in filter(None, map(shape, text.splitlines())):
        start, is_cut = line.removesuffix("...").strip(), line.endswith("...")
        places = [n for n, actual in enumerate(rest) if actual == line or (is_cut and actual.startswith(start))]
        if not places and start:
            missing.append(line)
        elif start:
            rest = rest[places[0] + 1 :]
    return missing


def test_a_line_is_found_by_its_shape_and_in_order() -> None:
    printed = "step   7/300 | loss 5.25 | lr 1e-03\nother\nsaved in 12 s\n"
    assert find_missing("...\nstep 1/300 | loss 5 | ...\n...\nsaved in 0.4 s\n...", printed) == []
    assert find_missing("saved in 0.4 s\nother", printed) == ["other"]


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    commands = [command for command, _ in steps()]
    assert len(commands) == 9
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    folder, script = tmp_path / "empty", tmp_path / "tutorial.sh"
    folder.mkdir()
    # As in a terminal, a command that fails does not end the shell: its output is missing.
    script.write_text("".join(f"{command}echo '{END_OF_STEP}'\n" for command in commands))
    done = subprocess.run(
        ["bash", str(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
    )
    printed = done.stdout.split(f"{END_OF_STEP}\n")[:-1]
    assert len(printed) == len(commands), done.stdout
    for (command, shown_lines), output in zip(steps(), printed, strict=True):
        assert find_missing(shown_lines, output) == [], f"{command}\n{output}"
    losses = re.findall(r"validation +loss +(\d+\.\d+)", printed[-2] + printed[-1])
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=2e-4)
