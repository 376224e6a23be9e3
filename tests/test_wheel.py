"""What `pip install llmscale` brings to a machine that has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from llmscale.cli.reproduce import RECIPES
from llmscale.config.bundled_files import DS_CONFIGS, HOSTFILES

ROOT = Path(__file__).resolve().parent.parent
#: What a wheel is made of.
SOURCES = ("llmscale", "ds_configs", "hostfiles", "recipes", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network, from a copy: a build leaves folders behind."""
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel holds."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "llmscale", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_every_ds_config_and_hostfile_is_in_it_as_a_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for shipped in (DS_CONFIGS, HOSTFILES, RECIPES):
            for name in shipped.names():
                path = f"{shipped.folder_name}/{name}{shipped.suffix}"
                assert archive.read(f"llmscale/{path}") == (ROOT / path).read_bytes()
        names = archive.namelist()
    assert {"llmscale/py.typed", "llmscale/recipes/nano.jsonl"} <= {*names}
    assert "llmscale/memory/activations/tables/ends.json" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"llmscale"}


def test_names_are_found_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    words = ("--model", "gpt2-124m", "--gpu", "a100-80gb", "--num-gpus", "8")
    done = run(installed, "estimate", *words, "--ds", "zero2", "ds_configs/zero3.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # There is no llmscale/train.py to give to a launcher.
    assert "  llmscale train --num-gpus 8 --ds zero2.json --model gpt2-124m " in done.stdout
    assert str(installed) in run(installed, "estimate", *words, "--ds", "zeero2", cwd=tmp_path).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_installed_wheel_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Into an environment of its own, which sees this one's libraries."""
    home, folder = tmp_path / "venv", tmp_path / "empty"
    venv.create(home, with_pip=True)
    folder.mkdir()
    site = next((home / "lib").glob("python*/site-packages"))
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    # A plain list of folders: the .pth files in them, of an editable install of this checkout, do not count.
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
    pip = [str(home / "bin" / "pip"), "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
    subprocess.run(pip, check=True)

    def call(*words: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [str(home / "bin" / "llmscale"), *words], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    call("data", "prepare", "--input", "text.txt", "--out", "set", "--tokenizer", "bytes", "--seq-len", "64")
    flags = ("--model", "tiny-1m", "--data", "set", "--run", "runs/a", "--global-batch-size", "4", "--log-every", "1")
    assert "step      5/5 | loss" in call("train", "--ds", "zero2", "--steps", "5", *flags)
    assert "training loss" in call("report", "runs/a")
    assert "the quick" in call("sample", "runs/a", "the quick", "--max-new-tokens", "4")
    assert "5 of 5" in call("runs")
