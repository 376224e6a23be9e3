"""Job arrays by datatrove's executor, on programs that stand for Slurm's and really run what they are given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.data.clean.clean_set import clean
from llmscale.data.clean.cleaned_set import load_clean_manifest
from llmscale.data.prepare.sources.open_source import open_source
from tests.conftest import HANG_S
from tests.data.clean.cluster import fake_slurm
from tests.data.clean.cluster.conftest import Crawl, check_same

pytest.importorskip("datatrove")
ROOT = Path(__file__).resolve().parents[4]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*words)` gives the command on a machine with Slurm."""
    programs, jobs = tmp_path / "bin", tmp_path / "jobs"
    programs.mkdir()
    jobs.mkdir()
    for name in ("sbatch", "squeue", "sinfo", "scontrol", "srun"):
        program = programs / name
        program.write_text(f"#!{sys.executable}\n{Path(fake_slurm.__file__).read_text()}")
        program.chmod(0o755)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        **{"PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SLURM": str(jobs), "PYTHONPATH": str(ROOT)},
        "OMP_NUM_THREADS": "1",
    }
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "llmscale", *words]
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    end_s = time.monotonic() + HANG_S
    while any((job / "state").read_text() in fake_slurm.LIVE for job in jobs.iterdir()):
        assert time.monotonic() < end_s
        time.sleep(0.1)


def _finish(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=2 * HANG_S)[0]


def test_bad_input_is_one_error_and_nothing_is_written(start: Start, crawl_files: Crawl, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    options = tmp_path / "options.yaml"
    options.write_text("partition: gpu\n")
    output = _finish(
        start(*crawl_files.words(tmp_path / "out"), "--executor", "slurm", "--executor-options", str(options))
    )
    assert output == "error: --executor slurm: there is no partition 'gpu'. Legal: cpu, large.\n"
    options.unlink()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_killed_and_given_again_it_waits_for_its_jobs(start: Start, crawl_files: Crawl, tmp_path: Path) -> None:
    words = [*crawl_files.words(tmp_path / "out"), "--executor", "slurm", "--tasks", "2"]
    first = start(*words)
    assert first.stdout is not None
    while "Sent to Slurm, partition cpu" not in (line := first.stdout.readline()):
        assert line, "it ended"
    first.kill()
    assert not (tmp_path / "out").exists()
    other = _finish(start(*words, "--shard-mb", "3"))
    assert "scancel --name=llmscale-clean-" in other
    second = _finish(start(*words))
    assert "Jobs of an earlier command are in Slurm's queue" in second and "Cleaned in" in second, second
    local = tmp_path / "local"
    clean(open_source(str(crawl_files.folder)), local, crawl_files.options, num_workers=1)
    check_same(local, tmp_path / "out")
    manifest = load_clean_manifest(tmp_path / "out")
    assert manifest is not None and manifest["cluster"]["executor"] == "slurm"  # type: ignore[index]
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.slow
def test_what_a_task_finds_wrong_is_told_and_the_rest_is_kept(start: Start, crawl_files: Crawl, tmp_path: Path) -> None:
    with (crawl_files.folder / "4.jsonl").open("a") as file:
        file.write("no record\n")
    words = [*crawl_files.words(tmp_path / "out"), "--executor", "slurm", "--tasks", "2"]
    output = _finish(start(*words))
    assert "4.jsonl, line 61: not valid JSON" in output and "--max-rejected" in output, output
    assert not (tmp_path / "out").exists()
    [work] = tmp_path.glob(".out*")
    done = [path.name for path in (work / "logs" / "1-look" / "completions").iterdir()]
    assert done == ["00000"]
    # Were these read again, nothing would be left of them.
    for number in range(3):
        path = crawl_files.folder / f"{number}.jsonl"
        status = path.stat()
        path.write_bytes(b" " * (status.st_size - 1) + b"\n")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    output = _finish(start(*words, "--max-rejected", "1"))
    assert "Cleaned in" in output, output
    manifest = load_clean_manifest(tmp_path / "out")
    assert manifest is not None and manifest["taken_in"]["documents"] == 250  # type: ignore[index]
