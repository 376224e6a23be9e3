"""The endless stream of one rank's micro-batches, from order, rank layout and shards.

The position is the number of samples seen: with a constant global batch size G, global batch s is stream positions [s
G, (s + 1) G). A feed starts at the beginning of any step, with any layout of ranks, and keeps no state. All ranks run
as many micro-batches: one with fewer than the others gets a filler at the end of the step.
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
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from llmscale.config.batch_plan import Batches
from llmscale.data.order.sample_order import MOST_POSITIONS, RankLayout, StreamOrder, shard_batch
from llmscale.data.shards.token_shards import WindowReader, are_targets, ids_of
from llmscale.error_handling import describe_death
from llmscale.errors import ConfigError, DataError, MachineError

#: Positions whose ids are computed together: one small batch alone costs as much as thirty.
_POSITIONS_AT_ONCE = 1024
#: Windows per message of a worker, in full micro-batches: a message costs as much as reading thirty windows.
_WINDOWS_AT_ONCE = 128
_T = TypeVar("_T")
_PARENT_CHECK_S = 1.0


class MicroBatch(NamedTuple):
    """One forward pass of one rank."""

    tokens: Tensor
    """Windows, int64 [micro_batch_size, seq_len + 1]: inputs are [:, :-1], targets [:, 1:]."""
    sample_ids: Tensor
    """Ids of the windows, int64 [micro_batch_size]; none for a filler.

    Its windows are those of another micro-batch of its step, so that they overflow only where these do.
    """
    is_target: Tensor | None = None
    """True for tokens that are targets, bool like `tokens`; None if all are."""

    def target_ids(self) -> Tensor:
        """Return the ids of all targets, [n]."""
        ids = self.tokens[:, 1:]
        if self.is_target is None:
            return ids.flatten()
        return ids[self.is_target[:, 1:]]

    def target_shares(self) -> NDArray[np.float64]:
        """Return the share of targets among the tokens of each window, [micro_batch_size]."""
        if self.is_target is None:
            return np.ones(len(self.tokens))
        return self.is_target[:, 1:].double().mean(1).numpy()

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss; none in a filler."""
        if self.is_filler:
            return 0
        return len(self.target_ids())

    @property
    def is_filler(self) -> bool:
        """True if it only keeps ranks in step."""
        return not len(self.sample_ids)


@dataclass(frozen=True)
class FeedPlan:
    """Sizes of one rank's share of a step. Raises ConfigError when a number is not positive."""

    layout: RankLayout
    micro_batch_size: int
    """Sequences per rank and forward pass."""
    gradient_accumulation_steps: int
    """Forward passes per step."""
    batches: Batches = ()
    """Batch sizes of the run by position, if they change."""
    samples: int | None = None
    """Sequences per step over all ranks, if fillers are needed."""

    def at(self, position: int) -> tuple[FeedPlan, int]:
        """Return the plan of the steps from a stream position on, and the number of samples of steps that have it."""
        row = bisect_right(self.batches, position, key=lambda known: known[1])
        if not row:
            return self, MOST_POSITIONS
        end = self.batches[row][1] if row < len(self.batches) else MOST_POSITIONS
        size = self.batches[row - 1][2]
        micro_steps = -(-size // (self.micro_batch_size * self.layout.data_parallel_size))
        return replace(self, gradient_accumulation_steps=micro_steps, samples=size), end - position

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def global_batch_size(self) -> int:
        """Sequences per step, over all ranks, without fillers."""
        places = self.micro_batch_size * self.gradient_accumulation_steps * self.layout.data_parallel_size
        return places if self.samples is None else self.samples


def rank_sample_ids(order: StreamOrder, plan: FeedPlan, first_sample: int, num_steps: int = 1) -> NDArray[np.int64]:
    """Return this rank's ids of the global batches from a stream position on: int64 [num_steps x accumulation x
    micro_batch_size]. Those of a filler are inverted (~id)."""
    positions = np.arange(first_sample, first_sample + num_steps * plan.global_batch_size, dtype=np.int64)
    batches = zip(np.split(positions, num_steps), np.split(order.rows(positions), num_steps), strict=True)
    unit = plan.micro_batch_size
    share = plan.micro_batch_size * plan.gradient_accumulation_steps
    ids = np.empty((num_steps, share), np.int64)
    is_filler = np.ones((num_steps, share), np.bool_)
    for step, (batch, rows) in enumerate(batches):
        mine = shard_batch(batch, rows, plan.layout, unit)
        is_filler[step, : len(mine)] = False
        ids[step] = np.resize(mine if len(mine) else batch[:unit], share)
    ids = order.sample_ids(ids.ravel())
    return np.where(is_filler.ravel(), ~ids, ids)


class Feed(Iterator[MicroBatch]):
    """Micro-batches from stream position `start_sample` on. Workers start at once, so build it before anything slow.
    `num_workers` processes read ahead; with 0 the training process reads. `pin_memory` page-locks micro-batches for
    asynchronous copies to a GPU.

    Iterating raises DataError, with equal text for faults here and in a worker, and MachineError when a worker was
    killed.
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
            raise ConfigError(f"The order has {order.num_samples} samples, the dataset {len(shards)}.")
        self.order = order
        self.plan = plan
        self._pin_memory = pin_memory
        self.has_mask = shards.has_mask
        can_fork = "fork" in multiprocessing.get_all_start_methods()
        if num_workers:
            together = max(1, _WINDOWS_AT_ONCE // plan.micro_batch_size)
        else:
            together = 1
        ahead = 2 * plan.gradient_accumulation_steps // (together * max(1, num_workers))
        dataset = _WindowDataset(shards)
        # Each worker's first message is one micro-batch, so that the first step starts early.
        ids = _MessageIds(order, plan, start_sample, together=together, num_alone=num_workers)
        self._waits = False
        self._killed: str | None = None
        # DataLoader costs as much per message as reading ten windows, so it is used with workers only.
        self._messages: Iterator[_Message] | None = map(dataset.__getitems__, ids)
        if num_workers:
            loader = DataLoader(
                dataset,
                batch_sampler=ids,
                collate_fn=_as_is,
                num_workers=num_workers,
                # Two steps ahead, so that fetching a shard or checking its hash delays no step.
                prefetch_factor=max(2, ahead),
                # Forked workers start in milliseconds; spawned ones import torch and the main module again. Workers
                # read files and copy memory: no CUDA, no collective, one thread.
                multiprocessing_context="fork" if can_fork else None,
                worker_init_fn=functools.partial(_start_worker, os.getpid()),
            )
            with _ignore_signals_in_workers(), _own_sigchld():
                self._messages = iter(loader)
        self._received: deque[_Windows] = deque()
        self._failure: str | None = None
        self._workers: list[BaseProcess] = getattr(self._messages, "_workers", [])
        self._notice_killed_workers()
        # Runs before multiprocessing's exit handler, which would wait for workers that ignore SIGTERM.
        atexit.register(self.close)

    def __next__(self) -> MicroBatch:
        if not self._received:
            self._receive()
        windows = self._received.popleft()
        sample_ids = torch.from_numpy(windows.sample_ids[windows.sample_ids >= 0])
        is_target = None
        ids = windows.tokens
        if self.has_mask:
            ids = ids_of(windows.tokens)
            is_target = torch.from_numpy(are_targets(windows.tokens))
        tokens = torch.from_numpy(ids.astype(np.int64))
        if self._pin_memory:
            return MicroBatch(tokens.pin_memory(), sample_ids, None if is_target is None else is_target.pin_memory())
        return MicroBatch(tokens, sample_ids, is_target)

    def _receive(self) -> None:
        """Wait for at least one more micro-batch."""
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
                # From torch's check every 5 s (the only one outside the main thread), or our error wrapped by torch.
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
        """Stop the workers; the feed is unusable afterwards."""
        workers = self._workers
        self._workers = []
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
        """Install a SIGCHLD handler that raises while a batch is awaited. torch checks for dead workers every 5 s only,
        and never notices one that died while writing into its pipe, which other workers hold open."""
        if not self._workers or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGCHLD)

        def notice(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)
            # Raise only here: in a collective, the other ranks would wait for this one.
            if self._waits:
                self._check_workers()

        signal.signal(signal.SIGCHLD, notice)


def _describe_end(number: int, worker: BaseProcess) -> str:
    """Return the message for a worker that has ended, which never happens in normal operation."""
    code = worker.exitcode or 0
    if code >= 0:
        how = f"ended with status {code}"
    else:
        how = describe_death(-code)
    return f"Data worker {number} (process {worker.pid}) {how}. Use fewer with --num-workers."


class _Windows(NamedTuple):
    """A micro-batch on its way from a worker.

    NumPy arrays go through the worker's pipe. Tensors would go through /dev/shm, which containers limit to 64 MB, and
    took 3 to 4 times as long for micro-batches of 8 windows of 257 tokens.
    """

    tokens: NDArray[np.unsignedinteger]
    """[micro_batch_size, seq_len + 1] in the dataset's dtype, uint16 or uint32, or with marks of targets."""
    sample_ids: NDArray[np.int64]
    """[micro_batch_size], inverted for a filler."""


class _Message(NamedTuple):
    """One message of a worker."""

    micro_batches: list[_Windows]
    failure: str | None
    """Reason why the next micro-batch is unreadable. Not an exception, because torch would add a traceback."""


class _WindowDataset(Dataset[_Message]):
    """Reads several micro-batches at a time."""

    def __init__(self, shards: WindowReader) -> None:
        self._shards = shards

    def __getitem__(self, index: int) -> _Message:
        raise NotImplementedError("read by micro-batch")

    def __getitems__(self, sample_ids: list[NDArray[np.int64]]) -> _Message:
        """Read micro-batches, given the ids of each, [micro_batch_size]."""
        try:
            ids = np.concatenate(sample_ids)
            if self._shards.has_mask:
                read = self._shards.read_marked
            else:
                read = self._shards.read
            windows = read(np.where(ids < 0, ~ids, ids))
            tokens = windows.reshape(len(sample_ids), -1, windows.shape[1])
        except DataError as error:
            if len(sample_ids) == 1:
                return _Message([], str(error))
            return self._until_failure(sample_ids)
        return _Message(list(map(_Windows, tokens, sample_ids)), None)

    def _until_failure(self, sample_ids: list[NDArray[np.int64]]) -> _Message:
        """Read the micro-batches before a fault, so that a step is not lost to the next one's fault."""
        read: list[_Windows] = []
        for ids in sample_ids:
            part = self.__getitems__([ids])
            read.extend(part.micro_batches)
            if part.failure is not None:
                return _Message(read, part.failure)
        return _Message(read, None)


class _MessageIds(Sampler[list[NDArray[np.int64]]]):
    """Endless sample ids of the micro-batches of each message: first `num_alone` messages of one micro-batch, then of
    `together`. Runs in the main process."""

    def __init__(self, order: StreamOrder, plan: FeedPlan, start_sample: int, *, together: int, num_alone: int) -> None:
        self._order = order
        self._plan = plan
        self._start_sample = start_sample
        self._together = together
        self._num_alone = num_alone

    def __iter__(self) -> Iterator[list[NDArray[np.int64]]]:
        size = self._plan.micro_batch_size
        first_sample = self._start_sample
        num_alone = self._num_alone
        while True:
            plan, samples = self._plan.at(first_sample)
            num_steps = max(1, min(samples, _POSITIONS_AT_ONCE) // plan.global_batch_size)
            ids = deque(rank_sample_ids(self._order, plan, first_sample, num_steps).reshape(-1, size))
            while ids:
                if num_alone > 0:
                    together = 1
                else:
                    together = min(self._together, len(ids))
                num_alone -= 1
                yield [ids.popleft() for _ in range(together)]
            first_sample += num_steps * plan.global_batch_size


def _as_is(batch: _T) -> _T:
    """Return the argument: `__getitems__` already made the micro-batches."""
    return batch


@contextlib.contextmanager
def _ignore_signals_in_workers() -> Iterator[None]:
    """Block signals in processes started within, as the trainer handles signals to the process group and needs its
    workers until it stops. They inherit the mask; ignoring signals themselves could come too late."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _own_sigchld() -> Iterator[None]:
    """Restore the SIGCHLD handler that torch replaces: torch's raises at any line of the trainer, even in a collective.
    Waiting for a batch notices a dead worker, too, where every rank can be told."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():  # elsewhere torch sets none
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _start_worker(parent: int, worker_id: int) -> None:
    # The parent's id is passed in: os.getppid() here would differ if the parent had just ended.
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Exit once the trainer was killed.

    With torch's check alone, the worker would block while writing into a full pipe, whose reading end other workers
    hold open.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
