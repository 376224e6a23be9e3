"""Faults of a real host, planted on a playground's and taken back: each is a context manager."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import deepspeed

from scripts.playground.hosts import Playground, PlaygroundHost

SITE_PACKAGES = Path(deepspeed.__file__).resolve().parents[1]

# Constants of linux/fanotify.h and fcntl.h.
FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD = 0x04, 0x01, 0x10000, -100


@dataclass(frozen=True)
class Stage:
    """Where faults are planted: two hosts, and a scratch folder that both see."""

    playground: Playground
    scratch: Path

    @property
    def first(self) -> PlaygroundHost:
        return self.playground.hosts[0]

    @property
    def second(self) -> PlaygroundHost:
        return self.playground.hosts[1]


def must(host: PlaygroundHost, *argv: str) -> None:
    done = host.run(argv)
    assert done.returncode == 0, f"{argv}: {done.stderr}"


@contextmanager
def mounted(host: PlaygroundHost, target: Path, *argv: str) -> Iterator[None]:
    """`mount` with `argv` over `target`, on one host only."""
    must(host, "mount", *argv, str(target))
    try:
        yield
    finally:
        must(host, "umount", str(target))


@contextmanager
def replaced(host: PlaygroundHost, target: Path, text: str, scratch: Path) -> Iterator[None]:
    """Another content of a file, on one host only."""
    other = scratch / f"replaced-{target.name}"
    other.write_text(text)
    with mounted(host, target, "--bind", str(other)):
        yield


@contextmanager
def edited(path: Path, text: str) -> Iterator[None]:
    """Another content of one of a host's own files, in place: it is mounted there by its inode."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def frozen_sshd(stage: Stage) -> Iterator[None]:
    """The kernel still takes connections, nobody answers."""
    daemons = stage.second.pids_running("sshd")
    for pid in daemons:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in daemons:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def key_not_accepted(stage: Stage) -> Iterator[None]:
    with edited(stage.second.etc_ssh / "authorized_keys", ""):
        yield


@contextmanager
def other_source(stage: Stage, source: Path) -> Iterator[None]:
    with replaced(stage.second, source, source.read_text() + "\n# changed here only\n", stage.scratch):
        yield


@contextmanager
def other_version(stage: Stage, distribution: str) -> Iterator[None]:
    (metadata,) = SITE_PACKAGES.glob(f"{distribution}-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    text = "\n".join("Version: 0.1.0" if line.startswith("Version: ") else line for line in lines)
    with replaced(stage.second, metadata, text, stage.scratch):
        yield


@contextmanager
def broken_import(stage: Stage) -> Iterator[None]:
    broken = "raise ImportError('libcudart.so.12: cannot open shared object file')\n"
    with replaced(stage.second, Path(deepspeed.__file__), broken, stage.scratch):
        yield


@contextmanager
def no_python(stage: Stage) -> Iterator[None]:
    with mounted(stage.second, Path(sys.executable).parent, "-t", "tmpfs", "tmpfs"):
        yield


@contextmanager
def small_shared_memory(stage: Stage) -> Iterator[None]:
    must(stage.second, "mount", "-o", "remount,size=32m", "/dev/shm")
    try:
        yield
    finally:
        must(stage.second, "mount", "-o", "remount,size=50%", "/dev/shm")


@contextmanager
def port_taken(stage: Stage, port: int) -> Iterator[None]:
    server = f"import socket; s = socket.socket(); s.bind(('', {port})); s.listen(); print('up', flush=True); input()"
    process = stage.first.popen(
        [sys.executable, "-c", server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def folder_of_its_own(stage: Stage, folder: Path, hosts: Sequence[PlaygroundHost], size: str = "1g") -> Iterator[None]:
    """Another, empty disk at the same path."""
    for host in hosts:
        must(host, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield
    finally:
        for host in hosts:
            must(host, "umount", str(folder))


@contextmanager
def disk_that_hangs(stage: Stage, file: Path) -> Iterator[None]:
    """Block every open of a file on one host, as a network disk whose server is gone does.

    The kernel asks this process for permission (fanotify) and gets no answer until the descriptor is closed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    copy = stage.scratch / f"hangs-{file.name}"
    shutil.copy(file, copy)
    with mounted(stage.second, file, "--bind", str(copy)):
        fanotify = libc.fanotify_init(FAN_CLASS_CONTENT, 0)
        assert fanotify >= 0, os.strerror(ctypes.get_errno())
        try:
            marked = libc.fanotify_mark(
                fanotify, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM), AT_FDCWD, os.fsencode(copy)
            )
            assert marked == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            os.close(fanotify)


@contextmanager
def resolves_to_loopback(stage: Stage) -> Iterator[None]:
    hosts = stage.second.folder / "hosts"
    with edited(hosts, hosts.read_text().replace(f"{stage.first.address} ", "127.0.1.1 ")):
        yield
