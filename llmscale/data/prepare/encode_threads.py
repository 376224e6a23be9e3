"""Read, tokenise and hash documents on all cores, in order, with bounded memory.

Threads, not processes: the encoders and hashes are native code that lets go of Python's lock, so a text is never
copied to another process. One thread reads ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
#: Batches under way per worker: enough to keep it busy while the others read and write.
READ_AHEAD = 3


def work_in_order(
    batches: Iterable[_T], work: Callable[[_T], _R], num_workers: int, *, weigh: Callable[[_T], int] = lambda _: 1
) -> Generator[_R, None, None]:
    """work(batch) for every batch, in the order given: the same for any number of workers.

    `weigh` says for how many usual ones a batch counts in memory: while a very large one is under way, few others are.
    `batches` is consumed by a thread of its own, which closes a generator when nothing more is wanted. What it or
    `work` raises is raised here, in its place.
    """
    num_places = (num_workers + 1) * READ_AHEAD
    places = threading.Semaphore(num_places)
    results: queue.Queue[tuple[Future[_R], int] | None] = queue.Queue()
    is_over = threading.Event()
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="encode")

    def read() -> None:
        failed: Future[_R] = Future()
        try:
            for batch in batches:
                weight = min(weigh(batch), num_places)
                for _ in range(weight):
                    places.acquire()
                if is_over.is_set():
                    return
                results.put((pool.submit(work, batch), weight))
            results.put(None)
        except BaseException as error:
            failed.set_exception(error)
            results.put((failed, 0))
        finally:
            # Whoever waits for a result may hold it: it would keep its files open.
            if isinstance(batches, Generator):
                batches.close()

    reader = threading.Thread(target=read, name="read", daemon=True)
    reader.start()
    try:
        while (entry := results.get()) is not None:
            result, weight = entry
            del entry
            yield result.result()
            del result
            places.release(weight)
    finally:
        is_over.set()
        places.release(num_places)
        pool.shutdown(wait=False, cancel_futures=True)
