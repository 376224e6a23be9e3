"""What asks for a save and an orderly end: signals, and the loss of the launcher. No torch: installed before anything
slow is imported."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from llmscale.training.launcher_chain import find_launchers

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: How often launchers are looked after.
_LAUNCHER_CHECK_S = 0.5
#: Asked to stop before its first step is done, a rank that has not come to a step boundary by then just ends. The main
#: rank is last: the others' connections to it would break, and say so at length.
_START_GRACE_S = 2.0
_MAIN_RANK_LATER_S = 0.5
#: A rank installs its handlers in its first tenth of a second; on a machine that is busy with something else, later.
_HANDLERS_PATIENCE_S = 10.0
_HANDLERS_CHECK_S = 0.05


@dataclass
class StopRequest:
    """Notes what asks to stop; the loop reads it at step boundaries, where all ranks can agree to stop.

    A handler that acted at once could interrupt a collective and leave the other ranks waiting in it. Before the first
    step is done there is nothing to lose but time: then the process ends by itself, soon, wherever it is.
    """

    received: list[str] = field(default_factory=list)
    """Names of the signals that came, in order; or which launcher is gone."""
    before_early_end: list[Callable[[], None]] = field(default_factory=list)
    """Called before the process ends during start-up, in another thread than the main one."""
    before_sudden_end: list[Callable[[], None]] = field(default_factory=list)
    """Called before a second SIGINT ends the process, in another thread than the main one."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starting: bool = True
    _early_reason: str | None = None

    def install(self) -> None:
        """From now on note SIGTERM, SIGINT, SIGUSR1, and SIGHUP unless nohup has it ignored, instead of dying of them.
        A second SIGINT ends at once."""
        numbers = [*STOP_SIGNALS]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._listen(numbers)
        for number in numbers:
            signal.signal(number, self._note)

    def watch_launchers(self) -> None:
        """From now on the end of a launcher above this process asks to stop, too."""
        launchers = find_launchers()

        def watch() -> None:
            while True:
                for launcher in launchers:
                    if launcher.is_gone:
                        self.received.append(f"the end of its launcher ({launcher.describe()})")
                        self._end_early(self.received[0])
                        return
                time.sleep(_LAUNCHER_CHECK_S)

        if launchers:
            threading.Thread(target=watch, name="launchers", daemon=True).start()

    def leave_start_up(self) -> None:
        """From now on only the loop ends the process: there is something to save, or all ranks have agreed to stop."""
        with self._lock:
            self._starting = False

    @property
    def ends_early(self) -> bool:
        """It came during start-up: whatever fails now, fails because ranks are ending."""
        return self._starting and self._early_reason is not None

    def end_now(self) -> None:
        """End a start-up that was asked to stop, with status 0; returns when it is over already."""
        with self._lock:
            if not self._starting:
                return
            for action in self.before_early_end:
                with contextlib.suppress(OSError):
                    action()
            if os.environ.get("RANK", "0") == "0":
                line = f"stopped by {self._early_reason} before the first step: nothing was trained, nothing to save\n"
                # Not print: the main thread may be within one.
                with contextlib.suppress(OSError):
                    os.write(1, line.encode())
            os._exit(0)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)

    def _listen(self, numbers: list[signal.Signals]) -> None:
        """Watch for signals in a thread: Python runs no handler while the main thread waits in a collective or for a
        rank that never comes, and that is when somebody presses Ctrl-C twice."""
        arrivals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        # A data worker's signals are not ours: forked, it would write them into the same pipe.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

        def listen() -> None:
            """`arrivals` has one byte per signal, its number."""
            num_sigints = 0
            while byte := os.read(arrivals, 1):
                num_sigints += byte[0] == signal.SIGINT
                if num_sigints == 2:
                    with contextlib.suppress(Exception):
                        for action in self.before_sudden_end:
                            action()
                    # 128 + number is how shells report a signal.
                    os._exit(128 + signal.SIGINT)
                if byte[0] in numbers:
                    self._end_early(signal.Signals(byte[0]).name)

        threading.Thread(target=listen, name="signals", daemon=True).start()

    def _end_early(self, why: str) -> None:
        """Begin to end, unless training has begun."""
        if self._early_reason is not None or not self._starting:
            return
        self._early_reason = why
        # A thread of its own: a second SIGINT must still be heard.
        threading.Thread(target=self._end_together, name="early end", daemon=True).start()

    def _end_together(self) -> None:
        # One that was not told would wait for this one.
        _tell_other_ranks()
        time.sleep(_START_GRACE_S + (_MAIN_RANK_LATER_S if os.environ.get("RANK", "0") == "0" else 0.0))
        self.end_now()


def _tell_other_ranks() -> None:
    """SIGTERM to the other ranks of this job on this host, each once it has installed its handlers: before that it
    would die of the signal, and the job would count as failed."""
    told: set[int] = set()
    deadline = time.monotonic() + _HANDLERS_PATIENCE_S
    while True:
        others = _find_other_ranks() - told
        late = time.monotonic() > deadline
        for pid in others:
            if late or _catches_sigterm(pid):
                told.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        if late or others <= told:
            return
        time.sleep(_HANDLERS_CHECK_S)


def _find_other_ranks() -> set[int]:
    """Processes of this job's other ranks on this host: those that meet at the same place. Empty for one rank alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return set()
    ours = {f"{name}={os.environ.get(name, '')}".encode() for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")}
    our_rank = f"RANK={os.environ.get('RANK', '0')}".encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            variables = set((folder / "environ").read_bytes().split(b"\0"))
            is_rank = any(word.startswith(b"RANK=") for word in variables)
            if ours <= variables and is_rank and our_rank not in variables:
                found.add(int(folder.name))
    return found


def _catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, as the kernel shows it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # gone: nothing to wait for
    caught = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
