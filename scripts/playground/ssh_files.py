"""Keys and settings of ssh for the playground's hosts: one login key, one host key each, everybody known."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
    """For every host name of `addresses`, `folder`/NAME/etc_ssh (its /etc/ssh) and `folder`/NAME/hosts (/etc/hosts)."""
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
