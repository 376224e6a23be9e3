"""The shell entry points: what they do before anything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINTS = ("scripts/quickstart.sh", "scripts/test.sh", "scripts/check.sh", "scripts/bench/gpu.sh", ".ci/run")


def find_python(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run find_python of scripts/lib/environment.sh with `folder` alone on the PATH."""
    return subprocess.run(
        ["/bin/bash", "-c", f"set -euo pipefail; source {ROOT}/scripts/lib/environment.sh; find_python"],
        env={"PATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def make_python(folder: Path, name: str, version: str, has_venv: bool = True) -> Path:
    """A stand-in that answers as a Python of that version."""
    path = folder / name
    answers = f"""#!/bin/bash
case $2 in
    *version_info*) echo {version} ;;
    *ensurepip*) exit {0 if has_venv else 1} ;;
    *executable*) echo "$0" ;;
esac
"""
    path.write_text(answers)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ENTRY_POINTS)
def test_entry_points_are_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


def test_takes_the_first_python_in_range(tmp_path: Path) -> None:
    make_python(tmp_path, "python3", "3.13")
    make_python(tmp_path, "python3.10", "3.10")
    wanted = make_python(tmp_path, "python3.12", "3.12")
    assert find_python(tmp_path).stdout.strip() == str(wanted)


def test_a_named_python_wins(tmp_path: Path) -> None:
    make_python(tmp_path, "python3", "3.12")
    wanted = make_python(tmp_path, "mine", "3.10")
    assert find_python(tmp_path, PYTHON=str(wanted)).stdout.strip() == str(wanted)


def test_an_unsuitable_python_is_named_in_one_line(tmp_path: Path) -> None:
    make_python(tmp_path, "python3", "3.9")
    make_python(tmp_path, "python3.12", "3.12", has_venv=False)
    done = find_python(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    for words in ("3.10, 3.11 or 3.12", "python3 is 3.9", "python3.12 is 3.12 but has no venv", "PYTHON=/path/to"):
        assert words in done.stderr


def test_no_python_at_all_is_one_line(tmp_path: Path) -> None:
    done = find_python(tmp_path)
    assert done.returncode == 1
    assert "No Python was found" in done.stderr


def test_of_an_active_environment_the_python_it_was_made_of(tmp_path: Path) -> None:
    """Made anew by its own Python, an environment would be cleared with that Python in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "active")], check=True)
    found = Path(find_python(tmp_path / "active" / "bin").stdout.strip())
    assert found.is_file()
    assert tmp_path not in found.parents
