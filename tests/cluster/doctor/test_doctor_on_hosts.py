"""The doctor on two real hosts: healthy ones are green, and every planted fault is found, alone, with its fix."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.playground.hosts import Playground, PlaygroundHost, why_impossible
from tests.cluster.conftest import SHELL
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

# Constants of linux/fanotify.h and fcntl.h.
FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD = 0x04, 0x01, 0x10000, -100


@dataclass(frozen=True)
class Scene:
    """Two hosts, a run that could start on them, and a scratch folder that both see."""

    playground: Playground
    data: Path
    """The prepared set."""
    runs: Path
    """Folder above the run folder, on the shared disk."""
    scratch: Path

    @property
    def second(self) -> PlaygroundHost:
        return self.playground.hosts[1]

    def run_doctor(self, *flags: str) -> subprocess.CompletedProcess[str]:
        hostfile = self.playground.write_hostfile(self.scratch / "hostfile", 1)
        command = [sys.executable, "-m", "llmscale.cli.main", "doctor", "--json", "--hostfile", str(hostfile), *flags]
        run = ["--data", str(self.data), "--run", str(self.runs / "r"), "--model", "tiny-1m", "--steps", "10"]
        host = self.playground.hosts[0]
        return host.run([*command, "--", *run], cwd=REPOSITORY, environment=SHELL, timeout_s=600)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, tiny_set: Path) -> Iterator[Scene]:
    reason = why_impossible()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("doctor")
    for name in ("runs", "scratch"):
        (folder / name).mkdir()
    with Playground(2, folder / "playground", shared=[tmp_path_factory.getbasetemp()]) as playground:
        yield Scene(playground, tiny_set, folder / "runs", folder / "scratch")


# ---------------------------------------------------------------- faults of the second host, planted and taken back


@contextmanager
def mounted(scene: Scene, target: Path, *argv: str) -> Iterator[None]:
    """`mount` with `argv` over `target`."""
    assert scene.second.run(["mount", *argv, str(target)]).returncode == 0
    try:
        yield
    finally:
        assert scene.second.run(["umount", str(target)]).returncode == 0


@contextmanager
def edited(path: Path, text: str) -> Iterator[None]:
    """Another content of one of the host's own files, in place: it is mounted there by its inode."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def key_not_accepted(scene: Scene) -> AbstractContextManager[None]:
    return edited(scene.second.etc_ssh / "authorized_keys", "")


def no_python(scene: Scene) -> AbstractContextManager[None]:
    return mounted(scene, Path(sys.executable).parent, "-t", "tmpfs", "tmpfs")


def other_source(scene: Scene) -> AbstractContextManager[None]:
    source, other = REPOSITORY / "llmscale" / "train.py", scene.scratch / "train.py"
    other.write_text(f"{source.read_text()}\n# changed here only\n")
    return mounted(scene, source, "--bind", str(other))


@contextmanager
def disk_that_hangs(scene: Scene) -> Iterator[None]:
    """Block every open of the dataset's manifest, as a network disk whose server is gone does.

    The kernel asks this process for permission (fanotify) and gets no answer until the descriptor is closed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    manifest, copy = scene.data / "manifest.json", scene.scratch / "manifest.json"
    shutil.copy(manifest, copy)
    with mounted(scene, manifest, "--bind", str(copy)):
        fanotify = libc.fanotify_init(FAN_CLASS_CONTENT, 0)
        assert fanotify >= 0, os.strerror(ctypes.get_errno())
        try:
            event = ctypes.c_uint64(FAN_OPEN_PERM)
            marked = libc.fanotify_mark(fanotify, FAN_MARK_ADD, event, AT_FDCWD, os.fsencode(copy))
            assert marked == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            os.close(fanotify)


def runs_not_shared(scene: Scene) -> AbstractContextManager[None]:
    return mounted(scene, scene.runs, "-t", "tmpfs", "tmpfs")


def peer_is_loopback(scene: Scene) -> AbstractContextManager[None]:
    hosts = scene.second.folder / "hosts"
    return edited(hosts, hosts.read_text().replace(f"{scene.playground.hosts[0].address} ", "127.0.1.1 "))


# ---------------------------------------------------------------- the tests


def test_a_healthy_pair_is_green_and_nothing_is_left(scene: Scene) -> None:
    done = scene.run_doctor()
    rows = json.loads(done.stdout)["rows"]
    assert [row for row in rows if row["status"] != "ok"] == []
    assert done.returncode == 0
    assert {"reach", "address", "run folder", "data", "run config", "all-reduce"} <= {row["name"] for row in rows}
    assert os.listdir(scene.runs) == []
    for host in scene.playground.hosts:
        assert host.pids_running("llmscale") == []
        assert host.run(["ls", "/dev/shm"]).stdout == ""


@pytest.mark.parametrize(
    ("plant", "row", "text", "fix"),
    [
        (key_not_accepted, "reach", "Permission denied", "copy your key"),
        (no_python, "reach", "node-1: ", "same path on every host"),
        (other_source, "versions", "llmscale: sources", "rsync -a --delete"),
        (disk_that_hangs, "reach", "after `reading the run's configuration, data and folder`", "stuck disk or driver"),
        (peer_is_loopback, "address", "on node-1: node-0 resolves to 127.0.1.1", "/etc/hosts"),
    ],
)
def test_a_planted_fault_is_found(
    scene: Scene, plant: Callable[[Scene], AbstractContextManager[None]], row: str, text: str, fix: str
) -> None:
    with plant(scene):
        done = scene.run_doctor("--no-network-test", "--timeout", "30")
    assert done.returncode == 1, done.stdout + done.stderr
    (wrong,) = [row for row in json.loads(done.stdout)["rows"] if row["status"] != "ok"]
    assert (wrong["name"], wrong["status"]) == (row, "fail")
    assert text in wrong["found"]
    assert fix in wrong["fix"]


def test_a_run_folder_of_each_host_is_found_by_the_ranks(scene: Scene) -> None:
    with runs_not_shared(scene):
        done = scene.run_doctor()
    (wrong,) = [row for row in json.loads(done.stdout)["rows"] if row["status"] != "ok"]
    assert (wrong["name"], wrong["status"], done.returncode) == ("run folder", "warn", 0)
    assert "is not there on node-1" in wrong["found"]
