"""Job arrays by datatrove's executor, on programs that stand for Slurm's and really run what they are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.data.clean.clean_set import clean
from llmscale.data.clean.cleaned_set import load_clean_manifest
from llmscale.data.clean.cluster.settings import SlurmSettings
from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import MachineError
from llmscale.terminal.progress import Progress
from tests.conftest import HANG_S
from tests.data.clean.cluster import fake_slurm
from tests.data.clean.cluster.conftest import Crawl, check_same

pytest.importorskip("datatrove")
ROOT = Path(__file__).resolve().parents[4]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Path]:
    """The folder of a Slurm's jobs, which it waits for at the end."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    yield jobs
    end_s = time.monotonic() + HANG_S
    while any(state.read_text() in fake_slurm.LIVE for state in jobs.glob("*/state")):
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.fixture
def environment(jobs: Path, tmp_path: Path) -> dict[str, str]:
    """Of a machine with Slurm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "sinfo", "scontrol", "srun"):
        program = programs / name
        program.write_text(f"#!{sys.executable} -S\n{Path(fake_slurm.__file__).read_text()}")
        program.chmod(0o755)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        **{"PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SLURM": str(jobs), "PYTHONPATH": str(ROOT)},
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """`start(*words)` gives the command on a machine with Slurm."""
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


class _Says(Progress):
    """Calls back with what it is to say."""

    def __init__(self, heard: Callable[[str], object]) -> None:
        super().__init__("", None, str, on_terminal=False)
        self.say = heard  # type: ignore[method-assign]


class _Work:
    """A folder, and commands that send tasks from it."""

    def __init__(self, folder: Path, jobs: Path) -> None:
        folder.mkdir()
        self.files, self.jobs = WorkFiles(folder), jobs

    def run(self, *num_tasks: int, tasks: str = "", heard: Callable[[str], object] = str) -> None:
        """Stages of so many, which run the line `tasks` of Python."""
        from llmscale.data.clean.cluster.on_slurm import OnSlurm

        (self.jobs / "tasks").write_text(tasks)
        stages = [Stage(f"{number}-stage", count, abs) for number, count in enumerate(num_tasks, 1)]
        slurm = OnSlurm(SlurmSettings(max_array_size=fake_slurm.ARRAY_SIZE), None, self.files.folder / "out")
        slurm.run(stages, self.files, _Says(heard))

    def done(self, stage: str) -> list[str]:
        return sorted(path.name for path in self.files.logs.glob(f"{stage}/completions/*"))


@pytest.fixture
def work(environment: dict[str, str], jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Work:
    for key in ("PATH", "FAKE_SLURM"):
        monkeypatch.setenv(key, environment[key])
    monkeypatch.setattr("llmscale.data.clean.cluster.on_slurm._LOOK_S", 0.05)
    monkeypatch.setattr("llmscale.data.clean.cluster.on_slurm._QUEUE_S", 0.1)
    return _Work(tmp_path / "work", jobs)


def test_what_an_earlier_command_had_not_sent_is_sent(work: _Work) -> None:
    (work.jobs / "refused").write_text("2")
    wait = f"while not __import__('os').path.exists({str(work.jobs / 'go')!r}): time.sleep(0.05)"
    with pytest.raises(MachineError, match="sbatch refused a job"):
        work.run(1, 2, tasks=wait)
    said: list[str] = []

    def heard(line: str) -> None:
        said.append(line)
        (work.jobs / "go").touch()

    work.run(1, 2, tasks=wait, heard=heard)
    assert "waiting for them" in said[0] and "Sent to Slurm" in said[1]
    assert work.done("1-stage") == ["00000"] and work.done("2-stage") == ["00000", "00001"]


def test_a_stage_waits_for_all_arrays_of_the_one_before(work: _Work) -> None:
    fails = (
        "if task == 1: (files / 'errors').mkdir(); (files / 'errors' / f'{stage}-00001.json').write_text('{REC}'); 1/0"
    )
    record = '{"kind": "machine", "what": "broken"}'
    with pytest.raises(MachineError, match="Task 1 of the stage 1-stage failed: broken"):
        work.run(3, 1, tasks=fails.replace("{REC}", record))
    assert work.done("1-stage") == ["00000", "00002"] and not work.done("2-stage")
    assert len(list(work.jobs.glob("*/state"))) == 3
    # What is sent next begins without what this one left.
    partial = work.files.folder / "looked" / ".00001.0123abcd"
    partial.mkdir(parents=True)
    with pytest.raises(MachineError, match="1 of 3 tasks of the stage 1-stage ended without a word"):
        work.run(3, 1, tasks="assert stage != '1-stage'")
    assert not partial.exists()


def test_the_error_that_is_told_is_of_the_stage_that_failed(tmp_path: Path) -> None:
    from datatrove.executor.local import LocalPipelineExecutor

    from llmscale.data.clean.cluster.blocks import StageBlock, check_complete

    files = WorkFiles(tmp_path)
    files.errors.mkdir()
    executors = [
        LocalPipelineExecutor([StageBlock(Stage(name, 2, abs), files)], tasks=2, logging_dir=str(files.logs / name))
        for name in ("10-first", "1-second")
    ]
    for name, task in (("1-second", 0), ("10-first", 0), ("10-first", 1)):
        files.error(name, task).write_text(json.dumps({"kind": "machine", "what": f"{name} {task}"}))
    # Tried again, it is done.
    executors[0].mark_rank_as_completed(0)
    with pytest.raises(MachineError, match="Task 1 of the stage 10-first failed: 10-first 1"):
        check_complete(executors, files)


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
