"""A process that has imported what ranks import, and forks the processes that tests start (see tests/warm_start.py).

Run as `python warm_server.py SOCKET`, a listening socket. Each message on a connection asks for one process: its words,
folder and variables as JSON, and four descriptors. The first three become its standard streams. On the fourth, 4 bytes
each, the process sends its id once it is set up, and this one the status with which it ended. This one does nothing but
imports and `do_once`, so that nothing is cached that a process would not compute by itself. It ends with its last
connection, and every process ends with the connection that asked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import logging
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import types
from typing import Any, NoReturn

#: Modules that training imports while it builds its engine.
LATE_IMPORTS = (
    "torch._dynamo",
    "torch._inductor.utils",
    "torch._inductor.test_operators",
    "torch.onnx",
    "torch.nn.utils",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.ops.adam",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_presets.registry",
    "deepspeed.moe.ep_repack",
    "deepspeed.ops.triton_ops",
    "torch._inductor.compiler_bisector",
    "torch.utils.serialization.config",
    "torch.profiler._cupti_monitor",
    "encodings.idna",
    "encodings.utf_8_sig",
    "setuptools",
    "distutils.sysconfig",
    "distutils.ccompiler",
    *(f"distutils.compilers.C.{name}" for name in ("unix", "msvc", "cygwin", "zos")),
)
#: Need packages that few processes need, or are what is started.
NOT_IMPORTED = (
    "llmscale.__main__",
    "llmscale.dry_run.hf_module",
    "llmscale.evaluate.lm_eval_tasks",
)
_PR_SET_PDEATHSIG = 1


def import_everything() -> None:
    """Import all modules of llmscale and LATE_IMPORTS. A missing package is left to the process that needs it."""
    if "WARM_SERVER_IMPORTS_NOTHING" in os.environ:
        return
    import llmscale

    names = [module.name for module in pkgutil.walk_packages(llmscale.__path__, "llmscale.")]
    for name in (*LATE_IMPORTS, *(name for name in names if not name.startswith(NOT_IMPORTED))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    do_once()
    gc.collect()
    gc.freeze()


def do_once() -> None:
    """Call what every run would call first and keep: a sixth of the time that a rank takes to start."""
    from pydantic import BaseModel

    from llmscale.config.run_flags import describe_keys
    from llmscale.training.run_folder import library_versions

    models = [BaseModel]
    for model in models:  # grows
        models += model.__subclasses__()
        if model.__module__.startswith("llmscale."):
            model.model_rebuild()
    describe_keys()
    library_versions()


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Fork and report until the last client has gone, then None. In a forked process: its request."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    running: dict[int, tuple[int, socket.socket, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd == listening.fileno():
                client = listening.accept()[0]
                clients[client.fileno()] = client
                selector.register(client, selectors.EVENT_READ)
                continue
            if key.fd in running:
                pid, connection, _ = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                report(connection, os.waitpid(pid, 0)[1])
                connection.close()
                continue
            message, descriptors, _, _ = socket.recv_fds(clients[key.fd], 1 << 20, 4)
            if not message:
                for pid, _, owner in running.values():
                    if owner == key.fd:
                        os.kill(pid, signal.SIGKILL)
                selector.unregister(key.fd)
                clients.pop(key.fd).close()
                if not clients:
                    return None
                continue
            assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
            streams, connection = descriptors[:3], socket.socket(fileno=descriptors[3])
            server = os.getpid()
            pid = os.fork()
            if not pid:
                # Closed here, or later objects of the same number would be closed in their stead.
                for child, (_, other, _) in running.items():
                    os.close(child)
                    other.close()
                selector.close()
                for other in (listening, *clients.values()):
                    other.close()
                request = json.loads(message)
                become(request, streams, server)
                report(connection, os.getpid())
                connection.close()
                return request
            for descriptor in streams:
                os.close(descriptor)
            watched = os.pidfd_open(pid)
            running[watched] = (pid, connection, key.fd)
            selector.register(watched, selectors.EVENT_READ)


def report(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever started it asks no more
        connection.send(struct.pack("i", number))


def become(request: dict[str, Any], streams: list[int], server: int) -> None:
    """Give this process what a start of its own would have given it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    open_standard_streams(bool(os.environ.get("PYTHONUNBUFFERED")))
    forget()


def open_standard_streams(is_unbuffered: bool) -> None:
    """Open standard streams as the interpreter does, also for the handlers that libraries made at import."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        mode = "w" if number else "r"
        raw = open(number, f"{mode}b", buffering=0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
        new = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=number == 2 or (number == 1 and raw.isatty()),
            write_through=is_unbuffered,
        )
        new.mode = mode  # type: ignore[misc]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
        for handler in [reference() for reference in logging._handlerList]:  # type: ignore[attr-defined]
            if getattr(handler, "stream", None) is old:
                handler.stream = new  # type: ignore[union-attr]


def forget() -> None:
    """Reset what modules recorded about the process that imported them."""
    import multiprocessing.process
    import tempfile

    import numpy as np

    importlib.invalidate_caches()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    tempfile.tempdir = None
    np.random.seed()
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def own_folder(folder: str) -> list[str]:
    """Return what the interpreter puts first on the path."""
    return [] if os.environ.get("PYTHONSAFEPATH") else [folder]


def run(words: list[str], library_path: list[str]) -> None:
    """`python WORDS`: a script, -m module or -c code, as `__main__`."""
    sys.path_importer_cache.clear()
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.path[:] = [*own_folder(os.getcwd()), *path, *library_path]
        sys.argv = words[1:]
        # It is run, as for the first time.
        sys.modules.pop(words[1], None)
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.path[:] = [*own_folder(""), *path, *library_path]
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        script = words[0]
        sys.path[:] = [*own_folder(os.path.dirname(os.path.abspath(script))), *path, *library_path]
        sys.argv = words
        main.__dict__.update(__file__=script, __cached__=None)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, main.__dict__)


def begin() -> tuple[list[str], list[str]] | None:
    """In every forked process: what it is to run, and where libraries are found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it is meant for the tests
    added = os.environ["PYTHONPATH"].split(os.pathsep)
    library_path = [folder for folder in sys.path[1:] if folder not in added]
    sys.path[0] = added[0]
    import_everything()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    return (request["words"], library_path) if request else None


def run_to_the_end(words: list[str], library_path: list[str]) -> NoReturn:
    """Run and end as the interpreter does, but without taking every imported module apart, which takes a second."""
    status = 0
    try:
        run(words, library_path)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | types.NoneType):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        status = 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    started = begin()
    if started is not None:
        run_to_the_end(*started)
