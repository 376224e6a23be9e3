"""`data clean` on a real Ray cluster, and in a Slurm job that starts one."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llmscale.cli import data
from llmscale.config.command_line import FlagParser
from llmscale.data.clean import on_ray
from llmscale.data.clean.annotate import CleanOptions
from llmscale.data.clean.on_ray import RayCluster, read_cluster
from llmscale.data.clean.run import clean
from llmscale.data.clean.stages import CleanJob, Stage
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import DataError, LlmscaleError, MachineError
from llmscale.terminal.progress import show_progress
from tests.conftest import HANG_S, free_port
from tests.data.clean.conftest import Crawl, check_same

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
BIN = Path(sys.executable).parent


def test_options_of_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("address: head:6379\n")
    assert read_cluster(path, 3, 2) == RayCluster("head:6379", 4, 3, 2)
    assert read_cluster(None, None, None) == RayCluster()
    with pytest.raises(DataError, match="No such file"):
        read_cluster(tmp_path / "none.yaml", None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("adress: a", r"unknown key 'adress'\. Did you mean 'address'\? Legal: address, memory_gb"),
        ("address: 7", "address = 7: must be a valid string"),
        ("memory_gb: 0", "memory_gb = 0: must be greater than or equal to 1"),
        ("memory_gb: 1.5", "must be a valid integer"),
        ("memory_gb: true", "must be a valid integer"),
    ],
)
def test_wrong_options_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError, match=f"--executor-options .*{message}"):
        read_cluster(path, None, None)


def _call(*words: str) -> None:
    parser = FlagParser(prog="llmscale")
    data.add_parser(parser.add_subparsers())
    args: argparse.Namespace = parser.parse_args(["data", "clean", *words])
    args.handler(args)


def test_a_cluster_that_does_not_answer_is_named_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words.")
    (tmp_path / "options.yaml").write_text(f"address: 127.0.0.1:{free_port()}\n")
    flags = ("--steps", "exact", "--executor", "ray", "--executor-options", str(tmp_path / "options.yaml"))
    with pytest.raises(LlmscaleError, match=r"no Ray cluster answers .* `ray start --head`"):
        _call("--input", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *flags)
    assert not (tmp_path / "out").exists()


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["ray", *(name for name in sys.modules if name.startswith("ray."))]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "text.txt").write_text("Some words.")
    with pytest.raises(DataError, match=r"pip install -e .*\[data,clean,clean-cluster\]"):
        _call("--input", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--executor", "ray")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray")
    # Paths of Unix sockets are short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    port = free_port()
    command = [
        str(BIN / "ray"),
        "start",
        "--head",
        "--block",
        "--num-cpus",
        "2",
        "--port",
        str(port),
        # Its workers' own range, 10002 to 19999, may hold that port.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--include-dashboard=false",
        "--temp-dir",
        folder,
        "--object-store-memory",
        "100000000",
    ]
    head = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + HANG_S
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert head.poll() is None and time.monotonic() < end_s
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(HANG_S)
        shutil.rmtree(folder, ignore_errors=True)


def _start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmscale", *words]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_killed_run_resumes(ray_address: str, crawl_files: Crawl, tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(f"address: {ray_address}\nmemory_gb: 1\n")
    local, out = tmp_path / "local", tmp_path / "out"
    clean(open_source(str(crawl_files.folder)), local, crawl_files.options, num_workers=1)
    words = [*crawl_files.command(out), "--executor", "ray", "--executor-options", str(options), "--tasks", "2"]
    first = _start(*words)
    annotated = tmp_path / ".out.partial-clean" / "annotated"
    end_s = time.monotonic() + 2 * HANG_S
    while len(list(annotated.glob("[0-9]*"))) < 2:
        assert first.poll() is None and time.monotonic() < end_s, first.communicate()[0]
        time.sleep(0.1)
    first.kill()
    first.communicate()
    assert not out.exists()
    crawl_files.erase()
    output = _start(*words).communicate(timeout=4 * HANG_S)[0]
    assert "Cleaned in" in output, output
    check_same(local, out)
    assert not list(tmp_path.glob(".out*"))


def _die(work: CleanJob, task: int) -> None:
    """End as a task that runs out of memory; task 1 always, the others at the first try."""
    tried = work.folder / f"tried-{task}"
    if task == 1 or not tried.exists():
        tried.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (work.folder / f"done-{task}").touch()


def _fail(work: CleanJob, task: int) -> None:
    raise DataError("line 7: bad input") if task == 0 else OSError("no disk")


def _run_stages(address: str, folder: str, kind: str) -> None:
    """Run a stage in a process of its own, which a hang does not outlive."""
    stage = Stage("1-test", 3 if kind == "die" else 1, _die if kind == "die" else _fail, _done_file)
    after = Stage("2-after", 1, _fail, _done_file)
    on_ray.plan_stages = lambda num_parts: [stage, after]  # type: ignore[assignment]
    work = CleanJob(Path(folder), (), CleanOptions(), None, 0, 1)
    try:
        with on_ray.connected(RayCluster(address, memory_gb=1)) as run_stages, show_progress("") as progress:
            list(run_stages(work, progress))
    except (DataError, MachineError) as error:
        print(type(error).__name__, error)


def _done_file(work: CleanJob, task: int) -> Path:
    return work.folder / f"done-{task}"


@pytest.mark.slow
def test_a_task_that_dies_is_tried_again_and_one_that_fails_is_reported(ray_address: str, tmp_path: Path) -> None:
    messages = []
    for kind in ("die", "fail"):
        (tmp_path / kind).mkdir()
        call = f"import {__name__} as test; test._run_stages({ray_address!r}, {str(tmp_path / kind)!r}, {kind!r})"
        command = [sys.executable, "-c", call]
        done = subprocess.run(command, env=ENVIRONMENT, timeout=HANG_S, capture_output=True, text=True)
        messages.append(done.stdout or done.stderr)
    assert "MachineError Stage 1-test: task 1 died 3 times" in messages[0] and "finished tasks are kept" in messages[0]
    assert {path.name for path in (tmp_path / "die").glob("done-*")} == {"done-0", "done-2"}
    assert messages[1] == "DataError line 7: bad input\n"


@pytest.mark.slow
def test_a_slurm_job_starts_its_own_cluster(crawl_files: Crawl, tmp_path: Path) -> None:
    """scripts/slurm/clean.sbatch with stand-ins for srun and scontrol, on two nodes that are this machine."""
    pytest.importorskip("ray")
    programs = tmp_path / "bin"
    programs.mkdir()
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    (programs / "scontrol").write_text("#!/bin/bash\nprintf '127.0.0.1\\nother\\n'\n")
    (programs / "srun").write_text(
        '#!/bin/bash\nshift 7\nfor node in 0 1; do (SLURM_NODEID=$node exec "$@") & done\n'
        "trap 'kill $(jobs -p)' TERM\nwait\nwait\n"
    )
    (programs / "ray").write_text(
        "#!/bin/bash\nextra=(--num-cpus 1 --object-store-memory 100000000)\n"
        f"[[ $* == *--head* ]] && extra+=(--temp-dir {folder})\n"
        f'exec {BIN}/ray "$@" "${{extra[@]}}"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "options.yaml").write_text("memory_gb: 1\n")
    environment = {
        **ENVIRONMENT,
        "PATH": f"{programs}:{BIN}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "nodes[0-1]",
    }
    words = [*crawl_files.command(tmp_path / "out")[2:], "--executor-options", str(tmp_path / "options.yaml")]
    command = ["bash", str(ROOT / "scripts/slurm/clean.sbatch"), *words]
    job = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output = job.communicate(timeout=4 * HANG_S)[0]
        assert "Cleaned in" in output, output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        shutil.rmtree(folder, ignore_errors=True)
    clean(open_source(str(crawl_files.folder)), tmp_path / "local", crawl_files.options, num_workers=1)
    check_same(tmp_path / "local", tmp_path / "out")
