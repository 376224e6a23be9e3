"""The shell entry points: what they do before anything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cli.main import build_parser
from llmscale.config.run_arguments import parse_run_config

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
    make_python(tmp_path, "python3", "3.14")
    make_python(tmp_path, "python3.10", "3.10")
    wanted = make_python(tmp_path, "python3.13", "3.13")
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
    for words in (
        "3.10, 3.11, 3.12 or 3.13",
        "python3 is 3.9",
        "python3.12 is 3.12 but has no venv",
        "PYTHON=/path/to",
    ):
        assert words in done.stderr


def test_python_3_14_is_refused_with_what_holds_it_back(tmp_path: Path) -> None:
    make_python(tmp_path, "python3", "3.14")
    done = find_python(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "mosaicml-streaming needs numpy below 2.2" in done.stderr


#: Stands for .venv/bin/python: notes what pip installs, and imports torchvision only where TORCHVISION says so.
FAKE_VENV_PYTHON = """#!/bin/bash
case "$*" in
    *"import torchvision"*) exit "${TORCHVISION_STATUS:-0}" ;;
    *pip*) echo "$*" >>../pip.log ;;
esac
"""


def ensure(place: Path, level: str, **environment: str) -> list[str]:
    """Run ensure_environment in `place` with stand-ins. Returns what pip was called with."""
    (place.parent / "pip.log").unlink(missing_ok=True)
    done = subprocess.run(
        [
            "/bin/bash",
            "-c",
            f'set -euo pipefail; source {ROOT}/scripts/lib/environment.sh; ensure_environment "${level}"',
        ],
        env={"PATH": f"{place.parent}/bin:/usr/bin:/bin", "PYTHON": str(place.parent / "bin/python3"), **environment},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    log = place.parent / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what an environment is made from, and a Python that makes stand-ins of environments."""
    place = tmp_path / "clone"
    (tmp_path / "bin").mkdir()
    place.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (place / name).write_text(name)
    (tmp_path / "venv_python").write_text(FAKE_VENV_PYTHON)
    (tmp_path / "venv_python").chmod(0o755)
    python = tmp_path / "bin/python3"
    python.write_text(f"""#!/bin/bash
case "$*" in
    *version_info*) echo 3.11 ;;
    *executable*) echo "$0" ;;
    "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp {tmp_path}/venv_python .venv/bin/python ;;
esac
""")
    python.chmod(0o755)
    return place


def test_the_environment_of_the_tests_serves_training_too(clone: Path) -> None:
    (first,) = ensure(clone, "FOR_TRAINING")
    assert ".[train,data] " in first
    assert ensure(clone, "FOR_TRAINING") == []
    (second,) = ensure(clone, "FOR_TESTS")
    assert ".[train,data,remote," in second
    assert ensure(clone, "FOR_TRAINING") == ensure(clone, "FOR_TESTS") == []


def test_an_environment_keeps_its_extras_when_the_constraints_change(clone: Path) -> None:
    ensure(clone, "FOR_TESTS")
    (clone / "constraints.txt").write_text("other")
    (again,) = ensure(clone, "FOR_TRAINING")
    assert ".[train,data,remote," in again


def test_a_moved_clone_gets_a_new_environment(clone: Path) -> None:
    ensure(clone, "FOR_TESTS")
    (clone / ".venv/old").touch()
    (again,) = ensure(clone.rename(clone.parent / "moved"), "FOR_TRAINING")
    assert ".[train,data] " in again
    assert not (clone.parent / "moved/.venv/old").exists()


def test_a_torchvision_that_cannot_be_imported_is_removed(clone: Path) -> None:
    _, second = ensure(clone, "FOR_TRAINING", TORCHVISION_STATUS="1")
    assert "uninstall" in second and second.endswith("torchvision")


def test_no_python_at_all_is_one_line(tmp_path: Path) -> None:
    done = find_python(tmp_path)
    assert done.returncode == 1
    assert "No Python was found" in done.stderr


def test_of_an_active_environment_the_python_it_was_made_of(tmp_path: Path) -> None:
    """Made anew by its own Python, an environment would be cleared with that Python in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "active")], check=True)
    actual = Path(find_python(tmp_path / "active" / "bin").stdout.strip())
    assert actual.is_file()
    assert tmp_path not in actual.parents


def test_a_list_of_keys_that_is_kept_by_hand_is_found(tmp_path: Path) -> None:
    """Lists and texts alike; three flags in a sentence, or values by key, are none."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from check_key_tables import tables
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    source = tmp_path / "module.py"
    names = {"lr", "steps", "tokens", "seed"}
    source.write_text(
        """
_FREE = ("lr", "steps", "tokens")
_FLAGS = "--lr --steps --seed"
_TEXTS = {"lr": "rate", "steps": "number", "seed": "start"}
_SAID = "Give lr, steps, tokens."
_VALUES = {"lr": lr, "steps": steps, "seed": seed}
_TWO = ("lr", "steps")
"""
    )
    assert [where for _, where, _ in tables(source, names)] == ["_FREE", "_FLAGS", "_TEXTS"]


@pytest.mark.parametrize("script", sorted((ROOT / "scripts/reproduce").glob("*.sh")), ids=lambda script: script.stem)
def test_a_reproduction_gives_each_command_flags_that_it_takes(script: Path, tmp_path: Path) -> None:
    """Its commands are recorded in place of being run; items that exist are not downloaded."""
    log, out, program = tmp_path / "log", tmp_path / "out", tmp_path / "bin" / "llmscale"
    out.mkdir()
    (out / "hellaswag.jsonl").write_text("")
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >>{log}\necho >>{log}\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [script, "--num-workers", "2"],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OUT": str(out)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    commands = [line.rstrip("\0").split("\0") for line in log.read_text().splitlines()]
    for words in commands:
        if words[0] != "train":
            build_parser(words).parse_args(words)
    configs = [parse_run_config(words[1:]) for words in commands if words[0] == "train"]
    assert [config.num_workers for config in configs] == [2] * len(configs)
    if script.stem == "nano-chat":
        assert [words[0] for words in commands] == ["data", "data", "train", "data", "train", "sample"]
        assert configs[1].init_from == str(configs[0].run)
        assert len((out / "chats.jsonl").read_text().splitlines()) == 200
        return
    every = 100 if script.stem == "nano" else 250
    assert [(config.val_every, config.eval_every) for config in configs] == [(every, every)]
    assert [words[0] for words in commands] == ["data", "train", "report", "report"]
    assert "validation loss" in done.stdout or "HellaSwag" in done.stdout


@pytest.mark.slow
def test_the_small_reproduction_ends_and_may_be_repeated(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
    words = [ROOT / "scripts/reproduce/nano.sh", "--nproc-per-node", "1"]
    for _ in range(2):
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "report.html").is_file()
