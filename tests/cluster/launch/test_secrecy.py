"""Keys of the user in a real launch between two hosts: who can see them on the way.

As another user with `ps`, and with a sniffer on the switch between the hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.playground.hosts import PlaygroundHost
from scripts.playground.kernel import until
from tests.cluster.conftest import SHELL
from tests.cluster.lab import Lab
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

KEYS = {
    name: f"key-{secrets.token_hex(16)}"
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_OWN_SECRET")
}
#: What another user can know of all processes: it looks until it is ended.
WATCH_ALL = """
import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
seen = set()
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ", "comm"):
            try:
                content = open(f"/proc/{pid}/{name}", "rb").read()
            except OSError:
                continue
            if content not in seen:
                seen.add(content)
                print(repr(content), flush=True)
"""


_WHOLE_PACKETS = ("-iany", "-s0", "-U", "-B32768")


class Spies:
    """On the machine and on the switch; what they have found is read after the launch."""

    def __init__(self, lab: Lab) -> None:
        self.seen, self.sniffed = lab.folder / "seen", lab.folder / "sniffed"
        errors = lab.folder / "tcpdump.log"
        on_switch = ["nsenter", f"--target={lab.playground.switch_pid}", "--net", "--"]
        with self.seen.open("w") as seen, errors.open("w") as log:
            # -I -S: nothing of this environment is read, which the other user may not.
            self._processes = [
                subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCH_ALL], stdout=seen),
                # Whole packets, at once, by any port of the switch; as root, for the file is ours.
                subprocess.Popen([*on_switch, "tcpdump", *_WHOLE_PACKETS, "-Zroot", "-w", self.sniffed], stderr=log),
            ]
        until(lambda: "listening on" in errors.read_text() and self.seen.stat().st_size, "the spies")

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()


@pytest.fixture
def spies() -> Iterator[Callable[[Lab], Spies]]:
    if shutil.which("tcpdump") is None:
        pytest.skip("needs tcpdump")
    made: list[Spies] = []

    def make(lab: Lab) -> Spies:
        made.append(Spies(lab))
        return made[-1]

    yield make
    for spy in made:
        spy.end()


def say_in_the_clear(host: PlaygroundHost, address: str, word: str) -> None:
    code = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[1].encode(), (sys.argv[2], 9))"
    host.run([sys.executable, "-c", code, word, address])


def listening_addresses(pid: int) -> list[str]:
    """IPv4 addresses that a process listens on, as the kernel's table writes them."""
    own = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def test_keys_reach_the_ranks_and_nobody_else(make_lab: Callable[..., Lab], spies: Callable[[Lab], Spies]) -> None:
    lab = make_lab(2)
    spy = spies(lab)
    spoken = f"spoken-{secrets.token_hex(16)}"
    say_in_the_clear(lab.hosts[0], lab.hosts[1].address, spoken)
    launch = lab.launch(
        lab.train_arguments("--steps", "60", "--save-every", "20"), flags=["--env", "MY_OWN_SECRET"], environment=KEYS
    )
    lab.until_step(5)
    (rank,) = lab.ranks_of(lab.hosts[1])
    environment = Path(f"/proc/{rank}/environ").read_bytes()
    supervisor = lab.hosts[0].pids_running("llmscale.cli.main launch")[-1]
    assert listening_addresses(supervisor) == []
    assert lab.wait(launch) == 0
    spy.end()

    seen, sniffed = spy.seen.read_bytes(), spy.sniffed.read_bytes()
    # The spies were awake.
    assert b"llmscale.cluster.launch.host" in seen
    assert spoken.encode() in sniffed
    for name, key in KEYS.items():
        assert f"{name}={key}".encode() in environment, name
        assert key.encode() not in seen, name
        assert key.encode() not in sniffed, name
        assert key not in lab.output.read_text(), name
        for path in filter(Path.is_file, lab.run.rglob("*")):
            assert key.encode() not in path.read_bytes(), f"{name} in {path}"
    # Whatever the launcher and its hosts say to each other.
    assert b"@llmscale" not in sniffed


def test_keys_reach_what_doctor_asks_and_nobody_else(
    make_lab: Callable[..., Lab], spies: Callable[[Lab], Spies]
) -> None:
    lab = make_lab(2)
    spy = spies(lab)
    hostfile = lab.playground.write_hostfile(lab.folder / "hostfile", slots=1)
    command = [sys.executable, "-m", "llmscale.cli.main", "doctor", "--hostfile", str(hostfile), "--json", "--"]
    done = lab.hosts[0].run(
        [*command, *lab.train_arguments()], cwd=REPOSITORY, environment={**SHELL, **KEYS}, timeout_s=180
    )
    spy.end()
    assert json.loads(done.stdout)["rows"]
    seen, sniffed = spy.seen.read_bytes(), spy.sniffed.read_bytes()
    assert b"llmscale.cluster.doctor.diagnose" in seen
    for name, key in KEYS.items():
        for place in (seen, sniffed, done.stdout.encode(), done.stderr.encode()):
            assert key.encode() not in place, name
