"""Real hosts on one machine for tests to break: Linux namespaces with their own addresses, sshd, processes and /tmp.

Each host has its own network, process, mount, host-name and shared-memory namespace; a bridge in one more namespace
joins them. The machine's network, ssh settings and home do not change, and killing a host's first process ends
everything in it. Hosts share the file system, except /tmp, /run, /dev/shm, /etc/hosts, /etc/ssh and ~/.ssh.

As on Debian, /etc/hosts maps a host's own name to 127.0.1.1. Real clusters have this too: libraries that look up their
own address by name then announce one that no other host can reach.

Needs root and the packages of REQUIRED_TOOLS. Standard library only. `playground.sh` is the command line of this file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.playground.host_init import HOST_PATH, HostSpec
from scripts.playground.kernel import (
    all_pids,
    command_line,
    in_network,
    kill,
    listens_on_ssh_port,
    net_space,
    only_child,
    pid_space,
    until,
    wait_gone,
)

#: Debian package by tool.
REQUIRED_TOOLS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
}


def why_impossible() -> str | None:
    """Return one line with the reason why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "playground hosts are namespaces, and making them needs root"
    missing = [tool for tool in REQUIRED_TOOLS if shutil.which(tool, path=HOST_PATH) is None]
    if missing:
        packages = sorted({REQUIRED_TOOLS[tool] for tool in missing})
        return f"{', '.join(missing)} not found: apt install {' '.join(packages)}"
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork"]
    tried = subprocess.run(
        ["unshare", *spaces, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True
    )
    return f"this kernel or container refuses namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class PlaygroundHost:
    """One host, running or powered off."""

    name: str
    address: str
    folder: Path
    """Folder of its files on the machine: etc_ssh, hosts, spec.json."""
    outer_pid: int = 0
    """Process of `unshare`, parent of the host's first process; killing it switches the host off. 0 when off."""
    init_pid: int = 0
    """The host's first process, by the machine's number; 0 when off."""

    @property
    def is_on(self) -> bool:
        return self.init_pid != 0

    @property
    def etc_ssh(self) -> Path:
        """Return the host's /etc/ssh: known hosts, keys, configuration. Tests change it to plant a fault."""
        return self.folder / "etc_ssh"

    def command(self, argv: Sequence[str], *, cwd: str | Path = "/") -> list[str]:
        """Return the command that runs `argv` on this host, started on the machine."""
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        # The working directory is looked up inside: outside, the same path may be another folder.
        enter = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
        return ["nsenter", f"--target={self.init_pid}", *spaces, "--", *enter, *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: str | Path = "/",
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> subprocess.Popen[str]:
        """Start `argv` on this host, with the environment of a login and the given variables."""
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]  # settings are Popen's own
            self.command(argv, cwd=cwd), env=login_environment(environment), text=True, **settings
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | Path = "/",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this host and return its result."""
        return subprocess.run(
            self.command(argv, cwd=cwd),
            env=login_environment(environment),
            text=True,
            capture_output=True,
            timeout=timeout_s,
        )

    def pids(self) -> list[int]:
        """Return the processes of the host by the machine's numbers, except its first one."""
        space = pid_space(self.init_pid)
        return [pid for pid in all_pids() if pid != self.init_pid and space is not None and pid_space(pid) == space]

    def pids_running(self, words: str) -> list[int]:
        """Return the processes of this host whose command line contains `words`, by the machine's numbers."""
        return [pid for pid in self.pids() if words in command_line(pid)]

    def cut_link(self) -> None:
        """Unplug the network cable: no peer is notified."""
        in_network(self.init_pid, "ip", "link", "set", "eth0", "down")

    def restore_link(self) -> None:
        in_network(self.init_pid, "ip", "link", "set", "eth0", "up")

    def kill_sshd(self) -> None:
        """Kill every sshd of the host, including sessions; processes started through them lose their terminal."""
        for pid in self.pids_running("sshd"):
            kill(pid)

    def start_sshd(self) -> None:
        subprocess.run(
            self.command(["/usr/sbin/sshd", "-f", "/etc/ssh/sshd_config"]), check=True, env=login_environment()
        )

    def power_off(self) -> None:
        """Remove the link and then kill every process, so that no peer is notified."""
        if self.is_on:
            # Both ends of the link: the kernel keeps the network of a dead host while one of its connections is open.
            in_network(self.init_pid, "ip", "link", "delete", "eth0")
            self.end()

    def end(self) -> None:
        """Kill every process of the host, and wait until they are gone."""
        # The first process takes all others with it, and `unshare`, its parent, ends when it is gone.
        kill(self.init_pid or self.outer_pid)
        wait_gone(self.outer_pid)
        wait_gone(self.init_pid)
        self.outer_pid = self.init_pid = 0


@dataclass
class Playground:
    """N hosts, node-0 to node-(N-1), and the bridge between them. A context manager, which removes them at exit."""

    num_hosts: int
    folder: Path
    """Scratch folder for keys, settings and all other files."""
    shared: Sequence[Path] = ()
    """Folders below /tmp, /run or /dev/shm that hosts share with the machine. Other folders are shared anyway."""
    detached: bool = False
    """True for hosts that outlive this process. Otherwise they die with it, however it ends."""
    hosts: list[PlaygroundHost] = field(default_factory=list)
    switch_pid: int = 0

    def __enter__(self) -> Playground:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Make the bridge and all hosts, and wait until every sshd answers. Raises RuntimeError if one does not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [f"node-{index}" for index in range(self.num_hosts)]
        self.hosts = [PlaygroundHost(name, f"10.77.0.{i + 1}", self.folder / name) for i, name in enumerate(names)]
        write_ssh_files(self.folder, {host.name: host.address for host in self.hosts})
        self.switch_pid = self._spawn(["unshare", "--net", "--", "sleep", "infinity"])
        until(lambda: net_space(self.switch_pid) != net_space(os.getpid()), "the bridge's namespace")
        in_network(self.switch_pid, "ip", "link", "add", "br0", "type", "bridge")
        in_network(self.switch_pid, "ip", "link", "set", "br0", "up")
        for host in self.hosts:
            self.power_on(host)

    def power_on(self, host: PlaygroundHost) -> None:
        """Start a host that is off, with an empty /tmp and /dev/shm, and the same keys."""
        spec = HostSpec(
            name=host.name,
            address=host.address,
            etc_ssh=str(host.etc_ssh),
            hosts_file=str(host.folder / "hosts"),
            shared=[str(path) for path in self._shared_paths()],
        )
        spec_path = host.folder / "spec.json"
        spec_path.write_text(json.dumps(vars(spec)))
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = [sys.executable, "-I", str(Path(__file__).with_name("host_init.py")), str(spec_path)]
        log = (host.folder / "init.log").open("a")
        host.outer_pid = self._spawn(["unshare", *spaces, "--", *init], log.fileno())
        log.close()
        host.init_pid = until(lambda: only_child(host.outer_pid), f"{host.name}'s first process")
        until(lambda: net_space(host.init_pid) not in (None, net_space(os.getpid())), f"{host.name}'s network")
        self._plug_in(host)
        until(lambda: listens_on_ssh_port(host.init_pid), f"sshd of {host.name} (see {host.folder / 'init.log'})")

    def down(self) -> None:
        """Remove every host and the bridge, whatever state they are in."""
        for host in self.hosts:
            host.end()
        kill(self.switch_pid)
        wait_gone(self.switch_pid)
        self.switch_pid = 0

    def write_hostfile(self, path: Path, slots: int) -> Path:
        """Write a hostfile of all hosts, for a program that runs on one of them."""
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path

    def _plug_in(self, host: PlaygroundHost) -> None:
        port = f"to-{host.name}"
        # The same hardware address each time, as on a real host: neighbours cache it.
        number = int(host.address.rsplit(".", 1)[1])
        end = ["peer", "name", "eth0", "address", f"02:00:0a:4d:00:{number:02x}", "netns", str(host.init_pid)]
        in_network(self.switch_pid, "ip", "link", "add", port, "type", "veth", *end)
        in_network(self.switch_pid, "ip", "link", "set", port, "master", "br0", "up")
        in_network(host.init_pid, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            in_network(host.init_pid, "ip", "link", "set", interface, "up")

    def _shared_paths(self) -> list[Path]:
        """Return the folders that a host's /tmp, /run and /dev/shm would hide: Python, repository, `shared`."""
        here = Path(__file__).resolve().parents[2]
        wanted = [here, Path(sys.prefix), Path(sys.base_prefix), *self.shared]
        hidden = [path.resolve() for path in wanted if path.resolve().parts[:2] in (("/", "tmp"), ("/", "run"))]
        hidden += [path.resolve() for path in wanted if str(path.resolve()).startswith("/dev/shm/")]
        return sorted(set(hidden))

    def _spawn(self, argv: list[str], output: int = subprocess.DEVNULL) -> int:
        """Start a process of the playground, which dies with this one unless `detached`."""
        leash = [] if self.detached else ["setpriv", "--pdeathsig", "KILL", "--"]
        process = subprocess.Popen(
            [*leash, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=login_environment(),
        )
        # wait_gone reaps it by number; without this Popen would warn that it still runs.
        process.returncode = 0
        return process.pid


def login_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a login of root, without the variables of this shell."""
    return {"PATH": HOST_PATH, "HOME": os.path.expanduser("~root"), "USER": "root", "LANG": "C.UTF-8", **(more or {})}


_SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
MaxStartups 100
PidFile none
"""
_SSH_CONFIG = """\
Host *
    User root
    IdentityFile /etc/ssh/user_key
    IdentitiesOnly yes
    StrictHostKeyChecking yes
    GlobalKnownHostsFile /etc/ssh/ssh_known_hosts
    UserKnownHostsFile /dev/null
"""


def write_ssh_files(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write each host's /etc/ssh and /etc/hosts to `folder`/NAME/etc_ssh and `folder`/NAME/hosts.

    All hosts share one login key, have a host key each, and know each other's.
    """
    user_key = folder / "user_key"
    _make_key(user_key)
    host_keys = {name: folder / name / "etc_ssh" / "ssh_host_ed25519_key" for name in addresses}
    for key in host_keys.values():
        key.parent.mkdir(parents=True, exist_ok=True)
        _make_key(key)
    known = "".join(f"{name},{addresses[name]} {_public_key(key)}\n" for name, key in host_keys.items())
    for name, key in host_keys.items():
        others = [f"{address} {other}" for other, address in addresses.items() if other != name]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *others]
        (folder / name / "hosts").write_text("\n".join(lines) + "\n")
        shutil.copy(user_key, key.with_name("user_key"))
        key.with_name("authorized_keys").write_text(_public_key(user_key) + "\n")
        key.with_name("ssh_known_hosts").write_text(known)
        key.with_name("sshd_config").write_text(_SSHD_CONFIG)
        key.with_name("ssh_config").write_text(_SSH_CONFIG)


def _make_key(path: Path) -> None:
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "playground", "-f", str(path)], check=True)


def _public_key(path: Path) -> str:
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])
