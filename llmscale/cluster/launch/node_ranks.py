"""The ranks of one host: start them through the launcher, follow their output and heartbeats, end them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from llmscale.cluster.extension_locks import HeldLocks
from llmscale.cluster.launch.process_tree import become_launcher, kill_descendants, process_state
from llmscale.cluster.launch.protocol import Output, RankStatus, Stacks, Start
from llmscale.cluster.launch.rank_output import RankOutput
from llmscale.training.heartbeat import STACKS_SIGNAL, WATCH_VARIABLE, heartbeat_path, output_path, stacks_path
from llmscale.untrusted.interpreter import module_command

#: Launchers of one host's ranks: DeepSpeed's per-host launcher, or torchrun.
STARTERS = ("deepspeed", "torchrun")
#: How long the launcher may take to notice that its ranks are dead and say why.
_LAUNCHER_WORD_S = 2.5
#: How long a rank may take to write its stacks.
_STACKS_WAIT_S = 2.0


class NodeRanks:
    """The launcher and the ranks of this host in one attempt."""

    def __init__(self, start: Start, environment: Mapping[str, str], folder: Path) -> None:
        """Start the launcher; the watch folder `folder` is removed by `close`. Raises OSError when it cannot be
        started."""
        first = start.node_rank * start.ranks_per_host
        self.ranks = range(first, first + start.ranks_per_host)
        self._folder = folder
        self._output = RankOutput()
        logs = Path(start.log_folder)
        for rank in self.ranks:
            self._output.add(rank, self._make_pipe(rank), logs / f"rank-{rank:05d}.log")
        self._deferred: list[signal.Signals] = []
        self._locks = HeldLocks()
        self._launcher = subprocess.Popen(
            starter_command(start),
            env={**os.environ, **environment, WATCH_VARIABLE: str(self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=become_launcher,
        )
        assert self._launcher.stdout is not None
        launcher_log = logs / f"launcher-{start.hosts[start.node_rank]}.log"
        self._output.add(None, os.dup(self._launcher.stdout.fileno()), launcher_log)

    def _make_pipe(self, rank: int) -> int:
        path = output_path(self._folder, rank)
        os.mkfifo(path, 0o600)
        # Also for writing, so that it neither ends between two writers nor blocks the first one.
        return os.open(path, os.O_RDWR)

    @property
    def launcher_code(self) -> int | None:
        """The launcher's exit status; negative for a signal, None while it runs. Leaves it unreaped: its number, which
        is its process group's too, cannot come to mean another process."""
        if self._launcher.returncode is not None:
            return self._launcher.returncode
        ended = os.waitid(os.P_PID, self._launcher.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code != os.CLD_EXITED:
            return -ended.si_status
        # The launcher passes a signal on as an exit status of -9, of which 247 is left.
        return ended.si_status - 256 if ended.si_status >= 192 else ended.si_status

    def read_output(self, is_last: bool = False) -> list[Output]:
        """Lines since the last call, of a flood the newest; with `is_last` unfinished ones too."""
        return self._output.read(is_last)

    def statuses(self) -> list[RankStatus]:
        """The newest heartbeat of every rank that has given one."""
        found = []
        for rank in self.ranks:
            with contextlib.suppress(OSError, ValueError, KeyError):
                status = json.loads(heartbeat_path(self._folder, rank).read_text())
                state = process_state(status["pid"])
                found.append(RankStatus(rank=rank, alive=state not in ("", "Z"), state=state, **status))
        return found

    def note_locks(self) -> None:
        """Remember which locks the ranks hold while they start, when extensions are built."""
        self._locks.note(status.pid for status in self.statuses() if status.phase == "starting")

    def send_signal(self, number: signal.Signals) -> None:
        """To the ranks, not to the launcher, which would end them. A rank that has not begun gets it when it has."""
        statuses = {status.rank: status for status in self.statuses()}
        for status in statuses.values():
            if status.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, number)
        if len(statuses) < len(self.ranks):
            self._deferred.append(number)

    def deliver_deferred(self) -> None:
        """Send again what came before every rank could take it; a second time does no harm."""
        if self._deferred and len(self.statuses()) == len(self.ranks):
            waiting, self._deferred = self._deferred, []
            for number in waiting:
                self.send_signal(number)

    def dump_stacks(self) -> list[Stacks]:
        """What every rank is doing. A rank that is stopped (state T) or dead cannot answer."""
        statuses = self.statuses()
        for status in statuses:
            if status.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, STACKS_SIGNAL)
        time.sleep(_STACKS_WAIT_S)
        stacks = []
        for status in statuses:
            text = ""
            with contextlib.suppress(OSError):
                text = stacks_path(self._folder, status.rank).read_text(errors="replace")
            stacks.append(Stacks(status.rank, status.state, text))
        return stacks

    def end(self) -> int | None:
        """SIGKILL whatever runs; the launcher's exit status.

        The ranks first: the launcher then says how the first of them had ended.
        """
        had_ranks = kill_descendants(self._launcher.pid)
        deadline = time.monotonic() + _LAUNCHER_WORD_S
        while had_ranks and self.launcher_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code = self.launcher_code
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
        # What left the process group is now a child of this process, which adopts orphans.
        kill_descendants(os.getpid())
        self._locks.remove()
        self._launcher.wait()
        return code

    def close(self) -> None:
        """Forget the watch folder and close the logs."""
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def starter_command(start: Start) -> list[str]:
    """Return the command of host number `start.node_rank`."""
    program = [start.script, *start.arguments]
    if start.starter == "torchrun":
        # Without -- torchrun would take --run for one of its own flags, abbreviated.
        return [
            *module_command("torch.distributed.run", f"--nnodes={len(start.hosts)}"),
            *(f"--node-rank={start.node_rank}", f"--nproc-per-node={start.ranks_per_host}", "--max-restarts=0"),
            *(f"--master-addr={start.master_addr}", f"--master-port={start.master_port}", "--"),
            *program,
        ]
    # What `deepspeed` itself starts on each host, by pdsh or with --no_ssh. Started without `deepspeed` in between,
    # which returns 0 when this was killed.
    world = {host: list(range(start.ranks_per_host)) for host in start.hosts}
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return [
        *module_command("deepspeed.launcher.launch", f"--world_info={encoded}", flags=["-u"]),
        *(f"--node_rank={start.node_rank}", f"--master_addr={start.master_addr}"),
        *(f"--master_port={start.master_port}", "--log_level=warning", *program),
    ]
