"""Processes that look at documents: the filters are Python, of which a process runs one line at a time."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from llmscale.data.clean.look import LookedBatch, Looker, look_at
from llmscale.data.clean.steps import CleanOptions
from llmscale.errors import MachineError

Look = Callable[[Sequence[str]], LookedBatch]


@contextmanager
def start_workers(options: CleanOptions, hashes_path: Path | None, num_workers: int) -> Iterator[Look]:
    """A function that several threads may call, each call by another process; one worker is this process itself.

    It raises MachineError when a process died.
    """
    if num_workers == 1:
        yield Looker(options, hashes_path)
        return
    # Not fork: this process has threads.
    context = multiprocessing.get_context("spawn")
    try:
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin)
    except OSError as error:  # semaphores are files in /dev/shm
        raise _cannot_work(error) from error

    def look(contents: Sequence[str]) -> LookedBatch:
        try:
            return pool.submit(functools.partial(look_at, options, hashes_path), contents).result()
        except BrokenProcessPool:
            raise MachineError(
                "A worker process died, most likely of too little memory. Give fewer --workers, or more memory."
            ) from None
        except OSError as error:
            raise _cannot_work(error) from error

    try:
        yield look
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _cannot_work(error: OSError) -> MachineError:
    return MachineError(
        f"Worker processes cannot work: {error}. They need room in /dev/shm and open files (`ulimit -n`); --workers 1 "
        "needs none."
    )


def _begin() -> None:
    """In a worker: Ctrl-C is the parent's, threads are, and a parent that was killed takes the worker along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
