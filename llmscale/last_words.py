"""What a program says when it ends badly: one line, with the traceback in a file; and streams that cannot be written.

Here and nowhere else whatever is not foreseen becomes something a user can read, under `llmscale` and on every rank.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from llmscale.errors import LlmscaleError, MachineError
from llmscale.terminal.colour import paint
from llmscale.terminal.human_numbers import with_singulars
from llmscale.untrusted.interpreter import protect_children
from llmscale.untrusted.terminal import make_visible_line

#: With this variable set, the traceback goes to stderr too.
DEBUG_VARIABLE = "LLMSCALE_DEBUG"
#: A word of an error longer than this is cut: a value of 5,000 digits is recognised by its ends.
_LONGEST_WORD = 320
_SHOWN = 60


def guarded(program: Callable[[], int]) -> int:
    """The exit status of `program`, whatever happens in it; what went wrong is one line on stderr.

    1 for what the machine did, or nobody foresaw; 2 for the user's mistakes; 130 for Ctrl-C; SystemExit passes.
    """
    prepare_streams()
    protect_children()
    try:
        status = program()
        return status if output_arrives() else status or 1
    except MachineError as error:
        say_error(str(error))
        return 1
    except LlmscaleError as error:
        say_error(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        _discard_output()
        return 0
    except SystemExit:
        # --help and --version.
        if output_arrives():
            raise
        return 1
    except BaseException as error:  # a panic of a Rust library is no Exception
        say_unexpected(error)
        return 1


def prepare_streams() -> None:
    """Characters that a stream's encoding lacks are written out (`\\xe9`) instead of ending the program, and a stream
    that was closed before the start leaves no number free for the next file to take."""
    # A file opened later would otherwise become descriptor 1, and take what is printed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not every stream has it


def output_arrives() -> bool:
    """Flush stdout; False, and a line on stderr, when what was printed cannot be written anywhere."""
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
    say_error(f"the output cannot be written: {error.strerror}.")


def say_error(text: str) -> None:
    """One line, whatever is in it."""
    say(f"{paint('error:', 'red', sys.stderr)} {make_visible_line(_shortened(with_singulars(text)))}")


def say(text: str) -> None:
    """A line on stderr; in vain where there is none."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def say_unexpected(error: BaseException, run_folder: Path | None = None) -> None:
    """One line about what nobody foresaw, and where its traceback lies: in `run_folder`/logs where there is such a
    folder, else among the temporary files.

    Of a host's ranks that fail in the same way, only the first speaks.
    """
    import traceback  # only where it is needed, as below: every command would wait for it

    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF):
        # A semaphore in a full /dev/shm names no file either.
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "print(" in (last.line or "") or last.name == "_print_message" or "/rich/" in last.filename:
            _discard_output()
            _say_lost_output(error)
            return
    rank = os.environ.get("RANK", "")
    who = f"rank {rank}: " if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") else ""
    what = " ".join(str(error).split())
    what = f"unexpected {type(error).__name__}{f': {what[:600]}' if what else ''}"
    text = "".join(traceback.format_exception(error))
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        say(text.rstrip())
    end = "" if what.endswith((".", "!", "?")) else "."
    path, is_first = _keep_traceback(text, what, rank, run_folder)
    if path is None:
        say(text.rstrip())
        say_error(f"{who}{what}{end} The traceback above could not be written to a file.")
    elif is_first:
        say_error(f"{who}{what}{end} The traceback is in {path}; please report it.")


def _keep_traceback(text: str, what: str, rank: str, run_folder: Path | None) -> tuple[Path | None, bool]:
    """Where it was written, None for nowhere; and whether no other rank of this start had written it before."""
    import hashlib
    import tempfile

    folders = [] if run_folder is None or (run_folder / "logs").is_symlink() else [run_folder / "logs"]
    # One name for all ranks that one launcher started here and that say the same.
    digest = hashlib.blake2b(what.encode(errors="replace"), digest_size=4).hexdigest()
    start = os.getppid() if rank else os.getpid()
    for folder in (*folders, Path(tempfile.gettempdir())):
        path = folder / f"llmscale-{start}-{digest}.traceback.txt"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            if rank and _is_ours(path):
                return path, False
            with contextlib.suppress(OSError):
                descriptor, name = tempfile.mkstemp(prefix="llmscale-", suffix=".traceback.txt", dir=folder)
                path = Path(name)
                if _write(descriptor, text):
                    return path, True
            continue
        except OSError:
            continue
        if _write(descriptor, text):
            return path, True
        with contextlib.suppress(OSError):
            path.unlink()
    return None, True


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def _write(descriptor: int, text: str) -> bool:
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return False
    return True


def _discard_output() -> None:
    """What is still in stdout's buffer goes nowhere: Python flushes it once more at exit."""
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
