"""One host's side of a launch: what it tells, and when it ends its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.cluster.launch import host as host_side
from llmscale.cluster.launch.host import MARK, RankLog
from llmscale.cluster.launch.ranks import process_state
from tests.cluster.launch.stand_in import host_command
from tests.conftest import HANG_S

#: Tells its process number, and that of a child in a session of its own.
RANK = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(1000)
"""


class Served:
    """A process of the host's side, greeted as a launcher does."""

    def __init__(self, folder: Path, limit_s: float, code: str = RANK) -> None:
        (folder / "rank.py").write_text(code)
        self.errors = folder / "errors.txt"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                host_command("a"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self.send({"cwd": str(folder), "environment": {"SECRET": "canary"}, "limit_s": limit_s})
        port = self.read("port")["port"]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        script = {"script": str(folder / "rank.py"), "arguments": []}
        self.send({"ranks": [0, 1], "variables": variables, "logs": str(folder / "logs"), **script})

    def send(self, message: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def read(self, key: str) -> dict[str, object]:
        """Return the next message with this key."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(MARK) and key in (message := json.loads(line[len(MARK) :])):
                return dict(message)
        raise AssertionError(key)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def begin(limit_s: float = 300.0, code: str = RANK) -> Served:
        served.append(Served(tmp_path, limit_s, code))
        return served[-1]

    yield begin
    for one in served:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("end", ["connection closed", "silence"])
def test_nothing_outlives_the_launcher(serve: Callable[..., Served], end: str) -> None:
    served = serve(300.0 if end == "connection closed" else 3.0)
    pids = [int(word) for _ in range(2) for word in str(served.read("text")["text"]).split()]
    assert len(pids) == 4
    if end == "connection closed":
        assert served.process.stdin
        served.process.stdin.close()
    assert served.process.wait(HANG_S) == 0
    assert [process_state(pid) for pid in pids] == [""] * 4
    why = "closed the connection" if end == "connection closed" else "has been silent for 3 s"
    text = served.errors.read_text()
    assert f"the ranks on this host were ended: `llmscale launch` {why}" in text and "SIGKILL" not in text


def test_exit_statuses_arrive_as_they_are(serve: Callable[..., Served]) -> None:
    served = serve(code="import os, sys; sys.exit(76) if os.environ['RANK'] == '1' else os.abort()")
    ends = [served.read("code") for _ in range(2)]
    assert {end["rank"]: end["code"] for end in ends} == {0: -6, 1: 76}
    assert served.process.wait(HANG_S) == 0, "the ranks are gone"


def test_a_reader_that_does_not_read_cannot_keep_ranks_alive(serve: Callable[..., Served]) -> None:
    flood = "import os\nprint(os.getpid(), flush=True)\nwhile True: print('x' * 1000)"
    served = serve(300.0, flood)
    pids = [int(str(served.read("text")["text"])) for _ in range(1)]
    time.sleep(1)  # all pipes are full
    assert served.process.stdin
    served.process.stdin.close()
    assert served.process.wait(HANG_S) == 0
    assert process_state(pids[0]) in ("", "Z"), "nobody has waited for it yet"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    hello = json.dumps({"cwd": f"{tmp_path}/missing", "environment": {}, "limit_s": 9}).encode() + b"\n"
    done = subprocess.run(host_command("a"), input=hello, capture_output=True, timeout=HANG_S)
    assert done.returncode == 1
    assert b"Every host needs the code at the same path" in done.stderr


def test_a_log_holds_the_newest_part_of_a_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_side, "LOG_BYTES", 1000)
    log = RankLog(tmp_path / "logs" / "rank.log")
    for number in range(1000):
        log.write(f"{number}\n".encode())
    older, newer = (tmp_path / "logs" / "rank.log.1").read_text(), (tmp_path / "logs" / "rank.log").read_text()
    assert len(older) <= 1000 and len(newer) <= 1000
    assert (older + newer).splitlines() == [str(number) for number in range(1000)][-len((older + newer).split()) :]


def test_a_log_that_cannot_be_written_does_not_stop_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file")
    RankLog(tmp_path / "logs" / "rank.log").write(b"text")
    assert "rank.log cannot be written" in capsys.readouterr().err
    os.symlink("/dev/full", tmp_path / "rank.log")
    RankLog(tmp_path / "rank.log").write(b"text")
