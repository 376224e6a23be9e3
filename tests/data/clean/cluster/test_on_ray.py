"""Tasks of a real Ray cluster, by datatrove's executor."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.data.clean.clean_set import clean
from llmscale.data.clean.cluster.settings import RaySettings
from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import MachineError
from llmscale.terminal.progress import show_progress
from tests.conftest import HANG_S
from tests.data.clean.cluster.conftest import Crawl, check_same

pytest.importorskip("datatrove")
pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def ray_address() -> Iterator[str]:
    # Paths of Unix sockets are short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    port = _free_port()
    command = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", "2"),
        *("--port", str(port), "--include-dashboard=false", "--temp-dir", folder),
        *("--object-store-memory", "100000000"),
    ]
    # Where datatrove keeps the logs of tasks, too.
    environment = {**ENVIRONMENT, "TMPDIR": folder}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + HANG_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
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


def test_no_cluster_is_one_error_and_nothing_is_written(crawl_files: Crawl, tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(f"address: 127.0.0.1:{_free_port()}\n")
    before = sorted(tmp_path.rglob("*"))
    words = [*crawl_files.words(tmp_path / "out"), "--executor", "ray", "--executor-options", str(options)]
    output = _start(*words).communicate(timeout=HANG_S)[0]
    assert output.startswith("error: --executor ray: no Ray cluster answers") and "ray start --head" in output
    assert output.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_killed_and_given_again_it_goes_on(ray_address: str, crawl_files: Crawl, tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(f"address: {ray_address}\nmemory_gb: 1\n")
    local, out = tmp_path / "local", tmp_path / "out"
    clean(open_source(str(crawl_files.folder)), local, crawl_files.options, num_workers=1)
    words = [*crawl_files.words(out), "--executor", "ray", "--executor-options", str(options), "--tasks", "2"]
    first = _start(*words)
    looked = tmp_path / ".out.partial-clean" / "logs" / "1-look" / "completions"
    end_s = time.monotonic() + 2 * HANG_S
    while not looked.exists() or len(list(looked.iterdir())) < 2:
        assert first.poll() is None and time.monotonic() < end_s, first.communicate()[0]
        time.sleep(0.1)
    first.kill()
    first.communicate()
    assert not out.exists()
    # Were these read again, nothing would be left of them.
    for path in crawl_files.folder.iterdir():
        status = path.stat()
        path.write_bytes(b" " * (status.st_size - 1) + b"\n")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    output = _start(*words).communicate(timeout=4 * HANG_S)[0]
    assert "Cleaned in" in output, output
    check_same(local, out)
    assert not list(tmp_path.glob(".out*"))


def _dies(task: int) -> int:
    """As the kernel ends a task of too much memory; all but task 0 the first time only."""
    tried = Path(f"tried-{task}")
    if task == 0 or not tried.exists():
        tried.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def _run_stages(address: str, folder: Path) -> None:
    """In a process of its own, which a hang does not outlive."""
    from llmscale.data.clean.cluster.on_ray import OnRay

    os.chdir(folder)
    ray = OnRay(RaySettings(address, memory_gb=1), None)
    try:
        with show_progress("") as progress:
            ray.run([Stage("1-dies", 3, _dies), Stage("2-after", 1, _dies)], WorkFiles(folder), progress)
    except MachineError as error:
        print(error)
    finally:
        ray.close()


@pytest.mark.slow
def test_a_task_that_the_kernel_kills_ends_the_command(ray_address: str, tmp_path: Path) -> None:
    call = f"import {__name__} as test, pathlib; test._run_stages({ray_address!r}, pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", call], env=ENVIRONMENT, timeout=HANG_S, capture_output=True, text=True)
    assert "1 of 3 tasks of the stage 1-dies ended without a word, the first of them task 0" in done.stdout, done.stderr
    # One that died once was tried again, and the next stage never begun.
    assert sorted(path.name for path in tmp_path.glob("logs/*/completions/*")) == ["00001", "00002"]
    assert sorted(path.name for path in tmp_path.glob("tried-*")) == ["tried-0", "tried-1", "tried-2"]
