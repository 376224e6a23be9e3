"""Start Python processes quickly: fork them from one that has imported everything.

`Process` and `run` are subprocess's Popen and run, for commands that begin with this interpreter. Importing torch and
DeepSpeed is 9 tenths of what a tiny run costs. A process has its own session, signals, streams, variables and exit
status as after a real start, and runs its script as `__main__`. It has no command line of its own in /proc, and this
process is not its parent. So tests of launchers, of signals, of what is imported when, and of what a terminal or a
shell sees start real processes. So does whatever cannot be had by forking: other variables that are read when modules
are imported, and subprocess's rarer arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SERVER = Path(__file__).with_name("warm_server.py")

#: Beginnings of variables that the interpreter or libraries read once, when they start.
READ_AT_IMPORT = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH",
    "CUDA",
    "TRITON",
    "DS_",
    "DEEPSPEED",
    "LOGLEVEL",
    "KINETO",
    "PYDANTIC",
    "CXX",
)
#: Variables that a forked process may have with any value: the server sets them up, or they are read later.
SET_AFTER_IMPORT = (
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_EXTENSIONS_DIR",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
#: What DeepSpeed finds by itself where there is no GPU.
DS_ACCELERATOR = None if Path("/dev/nvidiactl").exists() else "cpu"
#: Arguments of Popen's that a forked process does without.
_NOT_SUPPORTED = ("preexec_fn", "pass_fds", "shell", "executable", "startupinfo", "creationflags")
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
#: Environment of the servers, whatever tests set later. With COLD_TESTS=1 every start is a real one.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
#: Two, so that ranks have different hash seeds and one that trusts the order of a set meets another one that differs.
NUM_SERVERS = 2
#: Largest message on the socket.
MAX_BYTES = 100_000


class WarmServer:
    """A connection to a process that forks. The workers of one pytest run share each such process."""

    def __init__(self, number: int) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        # In Linux's abstract name space: nothing to remove afterwards.
        address = f"\0llmscale-warm-{run}-{number}"
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(address)
            except OSError:  # another worker started it
                self.control = self._connect(address)
            else:
                listening.listen()
                self.control = self._connect(address)
                self._start(listening.fileno())
        atexit.register(self.end)

    def _connect(self, address: str) -> socket.socket:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while True:
            try:
                control.connect(address)
                return control
            except ConnectionRefusedError:  # bound, and not yet listening
                time.sleep(0.01)

    def _start(self, listening: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(listening)],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            pass_fds=(listening,),
        )

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> tuple[socket.socket, int]:
        """Have a process forked; the socket on which its status will come, and its id."""
        connection, theirs = socket.socketpair()
        with theirs, contextlib.suppress(BrokenPipeError):
            socket.send_fds(self.control, [json.dumps(request).encode()], [*streams, theirs.fileno()])
        answer = connection.recv(4)
        if not answer:
            self.output.seek(0)
            raise RuntimeError(f"{SERVER.name} has ended:\n{self.output.read()}")
        return connection, struct.unpack("i", answer)[0]

    def end(self) -> None:
        """End what it forked for this process; the last process that does so ends it."""
        self.control.close()
        if self.process is not None and "PYTEST_XDIST_WORKER" not in os.environ:
            self.process.wait()
        self.output.close()
        atexit.unregister(self.end)


_servers: dict[int, WarmServer] = {}
_one_at_a_time = threading.Lock()


def server(number: int) -> WarmServer:
    """One of this process's servers, started when it is first asked for."""
    with _one_at_a_time:
        if number not in _servers:
            _servers[number] = WarmServer(number)
        return _servers[number]


def end_servers() -> None:
    """End those that were started."""
    while _servers:
        _servers.popitem()[1].end()


_turns = itertools.count()


class Process(subprocess.Popen[Any]):
    """A process that is forked from a warm one. `turn` chooses whose hash seed it has."""

    def __init__(self, args: Sequence[str | os.PathLike[str]], *, turn: int | None = None, **options: Any) -> None:
        self.turn = next(_turns) if turn is None else turn
        self._connection: socket.socket | None = None
        super().__init__(args, **options)

    @property
    def is_warm(self) -> bool:
        """True if it was forked, not started."""
        return self._connection is not None

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*values).arguments  # type: ignore[misc]
        words = [os.fsdecode(word) for word in given["args"]]
        variables = os.environ if given["env"] is None else given["env"]
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
        umask = os.umask(0)
        os.umask(umask)
        request = {
            "words": words[1:],
            "environment": environment,
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "new_session": given["start_new_session"],
            "umask": umask,
        }
        if (
            "COLD_TESTS" in ENVIRONMENT
            or words[0] != sys.executable
            or (words[1].startswith("-") and words[1] not in ("-m", "-c"))
            or any(given[name] for name in _NOT_SUPPORTED)
            or len(json.dumps(request)) > MAX_BYTES
            or not _has_our_imports(environment)
        ):
            super()._execute_child(*values)  # type: ignore[misc]
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        streams = [number if given[name] == -1 else given[name] for number, name in enumerate(_STREAMS)]
        try:
            self._connection, self.pid = server(self.turn % NUM_SERVERS).start(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    def _internal_poll(self, *values: Any, **more: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*values, **more)  # type: ignore[misc]
        if self.returncode is None and (status := self._status(is_patient=False)) is not None:
            self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        status = self._status(is_patient=not wait_flags)
        return (0, 0) if status is None else (self.pid, status)

    def _status(self, is_patient: bool) -> int | None:
        """Return the status in waitpid's form, or None while the process runs."""
        assert self._connection is not None
        try:
            answer = self._connection.recv(4, 0 if is_patient else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        # Without its server a process has been killed.
        status = struct.unpack("i", answer)[0] if answer else int(signal.SIGKILL)
        self._connection.close()
        return status


def _has_our_imports(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment would import what the server has imported."""

    def relevant(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(READ_AT_IMPORT)
            and name not in SET_AFTER_IMPORT
            and (name, value) != ("DS_ACCELERATOR", DS_ACCELERATOR)
        }

    is_ours = environment.get("PYTHONPATH", str(REPOSITORY)) == str(REPOSITORY)
    return is_ours and relevant(environment) == relevant(ENVIRONMENT)


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    check: bool = False,
    capture_output: bool = False,
    input: str | bytes | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """subprocess.run, by a warm process."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Process(args, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done
