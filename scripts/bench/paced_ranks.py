"""Jobs of real ranks that wait for orders, so that what is compared can take turns on one machine.

Every contestant keeps its own processes for the whole run (its own allocator, thread pool and DeepSpeed, nothing shared
with the others) and sleeps on a pipe while another one is measured. A round asks each of them once, so whatever else
the machine is doing falls on all of them alike.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

REPOSITORY = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """The ranks of one contestant, seen from the script that gives the orders."""

    def __init__(self, command: Sequence[str], world_size: int, *, threads: int, log: Path) -> None:
        """Start `command` once per rank, as a launcher would; what the ranks print goes to `log`."""
        port = free_port()
        self._log = log
        self._ranks = []
        with log.open("w") as output:
            for rank in range(world_size):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env={**os.environ, **{key: str(value) for key, value in place.items()}}
                        | {"PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"},
                        cwd=REPOSITORY,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        text=True,
                    )
                )

    def order(self, text: str) -> list[dict]:
        """Give every rank the same order; their answers, in rank order. SystemExit when a rank is gone."""
        for rank in self._ranks:
            try:
                cast("IO[str]", rank.stdin).write(text + "\n")
                cast("IO[str]", rank.stdin).flush()
            except BrokenPipeError:
                self._fail()
        return self.answers()

    def answers(self) -> list[dict]:
        """One answer from every rank."""
        lines = [cast("IO[str]", rank.stdout).readline() for rank in self._ranks]
        if not all(lines):
            self._fail()
        return [json.loads(line) for line in lines]

    def finish(self) -> None:
        """Wait for the ranks to end by themselves."""
        for rank in self._ranks:
            cast("IO[str]", rank.stdin).close()
        if any([rank.wait() for rank in self._ranks]):
            self._fail()

    def kill(self) -> None:
        """End whatever still runs."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def _fail(self) -> None:
        codes = [rank.poll() for rank in self._ranks]
        self.kill()
        raise SystemExit(f"a rank ended too early (exit codes {codes}):\n{self._log.read_text()[-4000:]}")


class Orders:
    """The other end, inside a rank. From here on stdout is for answers; what libraries print goes to stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> str | None:
        """The next order; None when there will be no more."""
        return sys.stdin.readline().strip() or None

    def answer(self, values: Mapping[str, object]) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()
