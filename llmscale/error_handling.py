"""Turn every exception into one line on stderr and an exit status, for `llmscale` and for every rank.

The traceback of an unexpected error goes to a file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from llmscale.errors import LlmscaleError, MachineError
from llmscale.terminal.colour import paint
from llmscale.terminal.human_numbers import with_singulars
from llmscale.untrusted.interpreter import protect_children
from llmscale.untrusted.terminal import make_visible_line

#: Environment variable that also prints the traceback on stderr.
DEBUG_VARIABLE = "LLMSCALE_DEBUG"
#: Longer words of a message, such as a value of 5,000 digits, are cut in the middle.
_LONGEST_WORD = 320
_SHOWN = 60
#: Counters of the kernel; `oom_kill` counts processes that it killed for lack of memory, also of a container.
_COUNTERS = Path("/proc/vmstat")


def run_cli(program: Callable[[], int]) -> int:
    """Run `program` and return its exit status; report any error as one line on stderr.

    Status 1 is for failures of the machine and unexpected errors, 2 for the user's mistakes, 130 for Ctrl-C.
    SystemExit passes through.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        # As `python -m llmscale` left it for its imports.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_streams()
    protect_children()
    try:
        status = program()
        return status if flush_stdout() else status or 1
    except LlmscaleError as error:
        print_error(str(error))
        # Not for every transient error: `data verify` and others say with 1 what they found.
        return 1 if isinstance(error, MachineError) else 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        _discard_output()
        return 0
    except SystemExit:
        # --help and --version.
        if flush_stdout():
            raise
        return 1
    except BaseException as error:  # a panic of a Rust library is no Exception
        report_crash(error)
        return 1


def prepare_streams() -> None:
    """Make stdout and stderr safe to print to.

    Characters that an encoding lacks are printed as escapes (`\\xe9`). If a stream was closed before the start, its
    descriptor is filled with /dev/null.
    """
    # Otherwise the next opened file would become descriptor 1 and receive what is printed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def make_output_resilient() -> None:
    """Make stdout and stderr drop what cannot be written, with one warning on stderr: a run goes on without a reader.

    A stream that other code has put in the place of stdout or stderr is left alone. A stream that was closed before the
    process started drops everything.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lasts
        elif stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _resilient(stream))


def _resilient(stream: TextIO) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(ResilientWriter(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class ResilientWriter(io.FileIO):
    """Accept every byte, and drop those that the descriptor refuses."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._has_failed = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # a buffer, as typeshed's ReadableBuffer
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self.fileno(), rest) :]
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(OSError):
                    os.write(
                        2, f"WARNING: the output cannot be written: {error.strerror}. The run continues.\n".encode()
                    )
        return size


def flush_stdout() -> bool:
    """Flush stdout. Return False, and print a line on stderr, if the output cannot be written."""
    if sys.stdout is None:
        _say_lost_output(OSError(errno.EBADF, os.strerror(errno.EBADF)))
        return False
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # `llmscale ... | head` closed the pipe: not an error, and Python's own flush at exit must not make it one.
        _discard_output()
    except OSError as error:
        _discard_output()
        _say_lost_output(error)
        return False
    return True


def _say_lost_output(error: OSError) -> None:
    print_error(f"the output cannot be written: {error.strerror}.")


def print_error(text: str) -> None:
    """Print an error on stderr as one line, with control characters escaped."""
    say(f"{paint('error:', 'red', sys.stderr)} {make_visible_line(_shortened(with_singulars(text)))}")


def say(text: str) -> None:
    """Print a line on stderr, if there is one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def report_crash(error: BaseException, run_folder: Path | None = None) -> None:
    """Report an unexpected error in one line, and save its traceback.

    The traceback goes to `run_folder`/logs if that exists, else to the folder for temporary files. If several ranks of
    a host fail in the same way, only the first one reports it.
    """
    import traceback  # slow to import, like the modules imported below

    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF):
        # Only failed prints count: a semaphore in a full /dev/shm gives an error without a file name, too.
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "print(" in (last.line or "") or last.name == "_print_message" or "/rich/" in last.filename:
            _discard_output()
            _say_lost_output(error)
            return
    rank = os.environ.get("RANK", "")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        who = f"rank {rank}: "
    else:
        who = ""
    what = " ".join(str(error).split())
    what = f"unexpected {type(error).__name__}{f': {what[:600]}' if what else ''}"
    text = "".join(traceback.format_exception(error))
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        say(text.rstrip())
    end = "" if what.endswith((".", "!", "?")) else "."
    path, is_first = _keep_traceback(text, what, rank, run_folder)
    if path is None:
        say(text.rstrip())
        print_error(f"{who}{what}{end} The traceback above could not be written to a file.")
    elif is_first:
        print_error(f"{who}{what}{end} The traceback is in {path}; please report it.")


def _keep_traceback(text: str, what: str, rank: str, run_folder: Path | None) -> tuple[Path | None, bool]:
    """Return the file with the traceback, or None, and whether this is the first rank of this start to write it."""
    import hashlib
    import secrets
    import tempfile

    if run_folder is None or (run_folder / "logs").is_symlink():
        folders = []
    else:
        folders = [run_folder / "logs"]
    # The same name for all ranks of one start on this host with the same error.
    if rank:
        start = _start_of_ranks()
    else:
        start = secrets.token_hex()
    digest = hashlib.blake2b(f"{start} {what}".encode(errors="replace"), digest_size=4).hexdigest()
    for folder in (*folders, Path(tempfile.gettempdir())):
        path = folder / f"llmscale-{os.getppid() if rank else os.getpid()}-{digest}.traceback.txt"
        try:
            # Never through a link. A traceback may show secrets, so its owner alone reads it.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except FileExistsError:
            return path, False
        except OSError:
            continue
        return path, True
    return None, True


def _start_of_ranks() -> str:
    """Return what the ranks of one start on this host share, and no other start has.

    A launcher that restarts them stays their parent, and in containers every launcher has the same process id.
    """
    import psutil

    launcher = psutil.Process().parent()
    names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return " ".join([str(launcher and launcher.create_time()), *(os.environ.get(name, "") for name in names)])


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit cannot fail."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
        sys.stdout.flush()


def _shortened(text: str) -> str:
    def cut(match: re.Match[str]) -> str:
        word = match.group()
        return f"{word[:_SHOWN]}...{word[-_SHOWN // 3 :]} ({len(word):,} characters)"

    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", cut, text)


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 99` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_oom_kills() -> int | None:
    """Return how many processes this machine's kernel has killed for lack of memory since its start, if known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _COUNTERS.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def describe_death(number: int, oom_kills_before: int | None = None) -> str:
    """Return `was killed by SIGKILL`, with who did it as far as that is known.

    `oom_kills_before` is the kernel's count when the process began; None: it killed any number.
    """
    cause = ""
    if number == signal.SIGKILL:
        cause = ", most likely by the kernel for lack of host memory (see dmesg)"
        count = count_oom_kills()
        if count is not None and count <= (oom_kills_before or 0):
            cause = " from another process: the kernel has killed none for lack of host memory"
    return f"was killed by {signal_name(number)}{cause}"
