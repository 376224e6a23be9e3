"""What `pip install llmscale` brings to a machine without a checkout: an sdist, and the wheel built from it."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import llmscale
from llmscale.config.bundled_files import DS_CONFIGS, HOSTFILES
from tests.test_readme import runnable

ROOT = Path(__file__).resolve().parent.parent
#: What a wheel is made of.
SOURCES = ("llmscale", "ds_configs", "hostfiles", "pyproject.toml", "README.md", "LICENSE")


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel of a folder without a network."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.tar.gz" if kind == "sdist" else "*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of a copy: a build leaves folders behind."""
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
    source, out, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "out", "unpacked"))
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    sdist = build("sdist", source, out)
    shutil.unpack_archive(sdist, unpacked)
    return build("wheel", unpacked / sdist.name.removesuffix(".tar.gz"), out)


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
        for shipped in (DS_CONFIGS, HOSTFILES):
            for name in shipped.names():
                path = f"{shipped.folder_name}/{name}{shipped.suffix}"
                assert archive.read(f"llmscale/{path}") == (ROOT / path).read_bytes()
        names = archive.namelist()
    assert "llmscale/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"llmscale"}


def test_names_are_found_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    words = ("--model", "gpt2-124m", "--gpu", "a100-80gb", "--num-gpus", "8")
    done = run(installed, "estimate", *words, "--ds", "zero2", "ds_configs/zero3.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # There is no llmscale/train.py to give to a launcher.
    assert "  llmscale train --num-gpus 8 --ds zero2.json --model gpt2-124m " in done.stdout
    assert str(installed) in run(installed, "estimate", *words, "--ds", "zeero2", cwd=tmp_path).stderr
    assert not list(tmp_path.iterdir())


def test_the_version_is_the_packages(wheel: Path) -> None:
    assert wheel.name == f"llmscale-{llmscale.__version__}-py3-none-any.whl"
    sdist = wheel.with_name(f"llmscale-{llmscale.__version__}.tar.gz")
    assert sdist.stat().st_size < 5e6


def find_requirements(wheel: Path, extra: str) -> set[str]:
    """Return the distributions here that pip would install with `wheel[extra]`. quickstart.sh removes torchvision."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [(line.removeprefix("Requires-Dist: "), extra) for line in lines if line.startswith("Requires-Dist: ")]
    actual: set[str] = set()
    asked = set()
    while wanted:
        if (entry := wanted.pop()) in asked:
            continue
        asked.add(entry)
        requirement = Requirement(entry[0])
        if requirement.marker and not requirement.marker.evaluate({"extra": entry[1]}):
            continue
        if requirement.name != "torchvision":
            assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True), entry
            actual.add(requirement.name)
            needed = importlib.metadata.requires(requirement.name) or []
            wanted += [(line, extra) for line in needed for extra in ("", *requirement.extras)]
    return actual


def make_environment(home: Path, distributions: set[str]) -> None:
    """Create an environment with these distributions of this one, as links, and nothing else."""
    venv.create(home, with_pip=True)
    site = next((home / "lib").glob("python*/site-packages"))
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / part).exists():
                (site / part).symlink_to(distribution.locate_file(part))


@pytest.mark.slow
def test_a_wheel_with_its_extra_train_runs_the_commands_of_the_readme(wheel: Path, tmp_path: Path) -> None:
    """In an environment with what `pip install llmscale[train]` brings, and in an empty folder."""
    home, folder = tmp_path / "venv", tmp_path / "empty"
    make_environment(home, find_requirements(wheel, "train"))
    pip = [str(home / "bin" / "pip"), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    texts = folder / "my_texts"
    texts.mkdir(parents=True)
    for number in range(20):
        (texts / f"{number}.txt").write_text(
            f"The history of science, part {number}: " + "a quick brown fox jumps. " * 120
        )

    def call(command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        environment |= {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        words = [str(home / "bin" / "llmscale"), *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    # The README's quickstart makes train's default dataset.
    call("llmscale data prepare --input my_texts --out data/python-stdlib --tokenizer bytes --seq-len 64")
    printed = {command: call(command) for command in runnable()}
    actual = "\n".join(printed.values())
    for words in ("finished at step", "validation loss", "The history of science", "Wrote exported", "ZeRO offload"):
        assert words in actual
    assert (folder / "report.html").stat().st_size > 50_000
    assert (folder / "exported" / "model.safetensors").exists()
