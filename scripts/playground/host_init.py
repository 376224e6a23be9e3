"""The first process of a playground host: mounts its own folders, starts sshd, reaps orphans. Run by hosts.py."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class HostSpec:
    """Settings of a host. Paths are the machine's."""

    name: str
    address: str
    etc_ssh: str
    hosts_file: str
    shared: list[str]


def main() -> int:
    spec = HostSpec(**json.loads(Path(sys.argv[1]).read_text()))
    socket.sethostname(spec.name)
    mount_own_folders(spec)
    wait_for_network(spec.address)
    os.makedirs("/run/sshd", exist_ok=True)
    subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/sshd_config"])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def mount_own_folders(spec: HostSpec) -> None:
    """Mount the host's own folders; `--mount-proc` has made the mounts private already."""
    # Kept open: a mount over /tmp hides the paths, and /proc/self/fd still reaches them.
    shared = {path: os.open(path, os.O_PATH) for path in spec.shared}
    etc_ssh, hosts_file = os.open(spec.etc_ssh, os.O_PATH), os.open(spec.hosts_file, os.O_PATH)
    home_ssh = os.path.expanduser("~root/.ssh")
    for target in ("/tmp", "/run", "/dev/shm", *([home_ssh] if os.path.isdir(home_ssh) else [])):
        mount("tmpfs", target, "tmpfs")
    os.chmod("/tmp", 0o1777)
    os.chmod("/dev/shm", 0o1777)
    for path, descriptor in shared.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path)
    mount(f"/proc/self/fd/{etc_ssh}", "/etc/ssh")
    mount(f"/proc/self/fd/{hosts_file}", "/etc/hosts")


def mount(source: str, target: str, kind: str = "") -> None:
    """Mount a new file system of `kind`; without a kind, bind `source`.

    By system call: the `mount` command would resolve /proc/self as its own process.
    """
    ms_bind_recursive = 4096 | 16384
    flags = 0 if kind else ms_bind_recursive
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def wait_for_network(address: str) -> None:
    """Wait until hosts.py has added the address from outside."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
                return
            except OSError:
                time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
