"""The stream of micro-batches of one rank: order, rank sharding and shards put together. It never ends.

The position is the number of samples seen: global batch s of a run that never changed G is stream positions
[s G, (s + 1) G). A feed can be started at any position, with any layout of ranks that divides G, and no state has to be
kept.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from llmscale.data.order.sample_order import RankLayout, StreamOrder, shard_batch
from llmscale.data.shards.token_shards import WindowReader
from llmscale.errors import ConfigError, DataError, MachineError

#: Positions whose ids are found together: those of one small batch alone cost as much as those of thirty.
_POSITIONS_AT_ONCE = 1024
#: Windows that a worker sends together, in whole micro-batches: a message costs as much as reading thirty windows.
_WINDOWS_AT_ONCE = 128
_T = TypeVar("_T")
_PARENT_CHECK_S = 1.0


class MicroBatch(NamedTuple):
    """One forward pass of one rank."""

    tokens: Tensor
    """Windows, int64 [micro_batch_size, seq_len + 1]: inputs are [:, :-1], targets [:, 1:]."""
    sample_ids: Tensor
    """Ids of the windows, int64 [micro_batch_size]."""


@dataclass(frozen=True)
class FeedPlan:
    """What one rank takes per step. Raises ConfigError when a number is not positive."""

    layout: RankLayout
    micro_batch_size: int
    """Sequences per rank and forward pass."""
    gradient_accumulation_steps: int
    """Forward passes per step."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def global_batch_size(self) -> int:
        """Sequences per step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.layout.data_parallel_size


def rank_sample_ids(order: StreamOrder, plan: FeedPlan, first_sample: int, num_steps: int = 1) -> NDArray[np.int64]:
    """This rank's ids of the global batches that begin at a stream position: int64
    [num_steps x accumulation x micro_batch_size]."""
    positions = np.arange(first_sample, first_sample + num_steps * plan.global_batch_size, dtype=np.int64)
    batches = zip(np.split(positions, num_steps), np.split(order.rows(positions), num_steps), strict=True)
    return order.sample_ids(np.concatenate([shard_batch(batch, rows, plan.layout) for batch, rows in batches]))


class Feed(Iterator[MicroBatch]):
    """Micro-batches from stream position `start_sample` on. Its workers start at once: build it before anything slow.
    `num_workers` processes read ahead, none reads in the training process; `pin_memory` page-locks micro-batches, for
    asynchronous copies to a GPU.

    Iterating raises DataError, with the same text whether the fault happened here or in a worker; MachineError when a
    worker was killed.
    """

    def __init__(
        self,
        shards: WindowReader,
        order: StreamOrder,
        plan: FeedPlan,
        *,
        start_sample: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if order.num_samples != len(shards):
            raise ConfigError(f"The order is of {order.num_samples} samples, the set holds {len(shards)}.")
        self.order = order
        self.plan = plan
        self._pin_memory = pin_memory
        can_fork = "fork" in multiprocessing.get_all_start_methods()
        together = max(1, _WINDOWS_AT_ONCE // plan.micro_batch_size) if num_workers else 1
        ahead = 2 * plan.gradient_accumulation_steps // (together * max(1, num_workers))
        dataset = _WindowDataset(shards)
        # Each worker sends one alone at first, which is what the first step waits for.
        ids = _MessageIds(order, plan, start_sample, together=together, num_alone=num_workers)
        self._waits = False
        self._killed: str | None = None
        # DataLoader itself takes as long per message as reading ten windows, so it is there for workers alone.
        self._messages: Iterator[_Message] | None = map(dataset.__getitems__, ids)
        if num_workers:
            loader = DataLoader(
                dataset,
                batch_sampler=ids,
                collate_fn=_as_is,
                num_workers=num_workers,
                # Two steps ahead, so that a worker that fetches a shard or checks its hash holds nobody up.
                prefetch_factor=max(2, ahead),
                # Forked workers start in milliseconds where spawned ones import torch and the main module again.
                # They read files and copy memory: no CUDA, no collective, one thread.
                multiprocessing_context="fork" if can_fork else None,
                worker_init_fn=functools.partial(_start_worker, os.getpid()),
            )
            with _deaf_children(), _own_sigchld():
                self._messages = iter(loader)
        self._received: deque[_Windows] = deque()
        self._failure: str | None = None
        self._workers: list[BaseProcess] = getattr(self._messages, "_workers", [])
        self._notice_killed_workers()
        # Before multiprocessing's own exit handler, which would wait for workers that ignore SIGTERM.
        atexit.register(self.close)

    def __next__(self) -> MicroBatch:
        if not self._received:
            self._receive()
        windows = self._received.popleft()
        tokens = torch.from_numpy(windows.tokens.astype(np.int64))
        sample_ids = torch.from_numpy(windows.sample_ids)
        return MicroBatch(tokens.pin_memory() if self._pin_memory else tokens, sample_ids)

    def _receive(self) -> None:
        """Wait for one micro-batch more at least."""
        if self._messages is None:
            raise DataError("The feed was closed.")
        if self._failure is None:
            self._waits = True
            try:
                self._check_workers()
                message = next(self._messages)
            except StopIteration:
                raise DataError("The feed ended, which it must never do.") from None
            except RuntimeError:
                # torch's own check, every 5 s (all there is outside of the main thread), or what it made of ours.
                self._check_workers()
                raise
            finally:
                self._waits = False
            self._received.extend(message.micro_batches)
            self._failure = message.failure
        if not self._received:
            self.close()
            raise DataError(self._failure)

    def close(self) -> None:
        """Stop the workers. The feed cannot be used afterwards."""
        workers, self._workers = self._workers, []
        self._messages = None
        self._received.clear()
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        atexit.unregister(self.close)

    def _check_workers(self) -> None:
        for number, worker in enumerate(self._workers):
            if self._killed is None and not worker.is_alive():
                self._killed = _describe_end(number, worker)
                self.close()
        if self._killed is not None:
            raise MachineError(self._killed) from None

    def _notice_killed_workers(self) -> None:
        """Also while a batch is waited for: torch asks for that of a dead worker every 5 s, and never when the worker
        died halfway through writing one into its pipe, which other workers hold open."""
        if not self._workers or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGCHLD)

        def notice(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)
            # Anywhere else it must not raise: in a collective, where the other ranks would wait for this one.
            if self._waits:
                self._check_workers()

        signal.signal(signal.SIGCHLD, notice)


def _describe_end(number: int, worker: BaseProcess) -> str:
    """Of a worker that has ended, which none does by itself."""
    code = worker.exitcode or 0
    how = f"ended with status {code}"
    if code < 0:
        names = {known.value: known.name for known in signal.Signals}
        how = f"was killed by {names.get(-code, f'signal {-code}')}"
    if code == -signal.SIGKILL:
        how += ", most likely by the kernel for lack of host memory (dmesg says so)"
    return f"Data worker {number} (process {worker.pid}) {how}. Use fewer with --num-workers."


class _Windows(NamedTuple):
    """A micro-batch on its way from a worker.

    NumPy arrays go through the worker's pipe. Torch tensors would go through /dev/shm, which containers limit
    to 64 MB, and took three to four times as long for micro-batches of 8 windows of 257 tokens.
    """

    tokens: NDArray[np.unsignedinteger]
    """[micro_batch_size, seq_len + 1] in the set's own type, uint16 or uint32."""
    sample_ids: NDArray[np.int64]
    """[micro_batch_size]."""


class _Message(NamedTuple):
    """What a worker sends at a time."""

    micro_batches: list[_Windows]
    failure: str | None
    """Why the micro-batch behind these cannot be read. No exception: torch would wrap its text in a traceback."""


class _WindowDataset(Dataset[_Message]):
    """Reads some micro-batches at a time."""

    def __init__(self, shards: WindowReader) -> None:
        self._shards = shards

    def __getitem__(self, index: int) -> _Message:
        raise NotImplementedError("read by micro-batch")

    def __getitems__(self, sample_ids: list[NDArray[np.int64]]) -> _Message:
        """sample_ids: of some micro-batches, each [micro_batch_size]."""
        try:
            windows = self._shards.read(np.concatenate(sample_ids))
            tokens = windows.reshape(len(sample_ids), -1, windows.shape[1])
        except DataError as error:
            return _Message([], str(error)) if len(sample_ids) == 1 else self._until_failure(sample_ids)
        return _Message(list(map(_Windows, tokens, sample_ids)), None)

    def _until_failure(self, sample_ids: list[NDArray[np.int64]]) -> _Message:
        """A step is trained on what can be read for it, whatever is wrong with the next one's."""
        read: list[_Windows] = []
        for ids in sample_ids:
            part = self.__getitems__([ids])
            read.extend(part.micro_batches)
            if part.failure is not None:
                return _Message(read, part.failure)
        return _Message(read, None)


class _MessageIds(Sampler[list[NDArray[np.int64]]]):
    """Sample ids of the micro-batches of one message after the other, for ever: `num_alone` messages of one, then of
    `together`. Runs in the main process."""

    def __init__(self, order: StreamOrder, plan: FeedPlan, start_sample: int, *, together: int, num_alone: int) -> None:
        self._order = order
        self._plan = plan
        self._start_sample = start_sample
        self._together = together
        self._num_alone = num_alone

    def __iter__(self) -> Iterator[list[NDArray[np.int64]]]:
        size, first_sample, num_alone = self._plan.micro_batch_size, self._start_sample, self._num_alone
        num_steps = max(1, _POSITIONS_AT_ONCE // self._plan.global_batch_size)
        while True:
            ids = deque(rank_sample_ids(self._order, self._plan, first_sample, num_steps).reshape(-1, size))
            while ids:
                together = 1 if num_alone > 0 else min(self._together, len(ids))
                num_alone -= 1
                yield [ids.popleft() for _ in range(together)]
            first_sample += num_steps * self._plan.global_batch_size


def _as_is(batch: _T) -> _T:
    """In place of the default collation: `__getitems__` has made the micro-batch already."""
    return batch


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started within never hear a signal to the process group. It is the trainer's to answer, and until it
    stops it needs its workers. They inherit the mask: ignoring signals themselves, they would be too late at times."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _own_sigchld() -> Iterator[None]:
    """Take back the handler by which torch raises at whatever line the trainer is when a worker dies, in a collective
    perhaps. Waiting for a batch finds it too, within 5 s, where every rank can be told."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():  # or torch has set none
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _start_worker(parent: int, worker_id: int) -> None:
    # Asked for here, the parent's number would be another one's when it had ended just now.
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """End a worker whose trainer was killed.

    torch's own check does not: it lets the worker finish, which waits for ever to write what is left into a full pipe
    (forked workers hold its reading end too, so it never breaks).
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
