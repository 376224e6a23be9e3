"""Host-side collectives (gloo) that fail on all ranks together, so that no rank waits for a peer that has gone.

An error meant for the user is raised on every rank. An unforeseen exception keeps its traceback on the rank where it
happened; the others raise MachineError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from llmscale.errors import DataError, LlmscaleError, MachineError

_T = TypeVar("_T")
_P = ParamSpec("_P")


@dataclass(frozen=True)
class StepVote:
    """The ranks' common decision at a step boundary."""

    stop: bool
    """At least one rank was asked to stop."""
    save: bool
    """A checkpoint is due by rank 0's clock."""
    rollback: bool
    """Rank 0 saw a loss spike that the run rolls back from."""
    log: bool
    """The next step is to be logged, by rank 0's clock."""
    ids_sum: int
    """Sum over ranks of the sample-id checksums, modulo 2^62."""
    targets: int
    """Sum over ranks of the targets of the step."""


@dataclass(frozen=True)
class Disks:
    """Ranks by the run folder that they see."""

    mains: tuple[int, ...]
    """By rank, the rank that writes the run's files on its disk; all 0 on a shared disk."""

    @property
    def is_one(self) -> bool:
        """Return whether all ranks share one disk."""
        return not any(self.mains)

    def neighbours(self, rank: int) -> list[int]:
        """Return the ranks on a rank's disk, itself included."""
        return [other for other, main in enumerate(self.mains) if main == self.mains[rank]]


def vote(
    group: dist.ProcessGroup,
    *,
    stop: bool = False,
    save: bool = False,
    rollback: bool = False,
    log: bool = False,
    ids_checksum: int = 0,
    targets: int = 0,
    failure: Exception | None = None,
) -> StepVote:
    """Decide together what to do at a step boundary, in one small all-reduce. Collective.

    When any rank reports a failure, every rank raises an error with the text of all failures: of their type if they
    have one in common, MachineError when none of them is a user's error, and DataError otherwise. A rank with an
    unforeseen exception raises that one.
    """
    own = [stop, save, failure is not None, ids_checksum % 2**62, rollback, log, targets]
    votes = torch.tensor(own, dtype=torch.int64)
    dist.all_reduce(votes, group=group)
    stops, saves, failures, ids_sum, rollbacks, logs, num_targets = votes.tolist()
    if failures:
        _raise_on_all_ranks(group, failure)
    return StepVote(
        stop=stops > 0,
        save=saves > 0,
        rollback=rollbacks > 0,
        log=logs > 0,
        ids_sum=ids_sum % 2**62,
        targets=num_targets,
    )


def on_all_ranks(group: dist.ProcessGroup, action: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """Run `action` on every rank and return this rank's result. When one rank fails, all raise as `vote` does.

    Collective.
    """
    result = None
    failure = None
    try:
        result = action(*arguments, **keywords)
    except Exception as error:
        failure = error
    vote(group, failure=failure)
    return cast("_T", result)


def on_main_rank(group: dist.ProcessGroup, action: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """Run `action` on rank 0 alone, and return its result, or raise its error, on every rank. Collective.

    The result is sent as a pickle.
    """
    result = None
    failure = None
    if dist.get_rank(group) == 0:
        try:
            result = action(*arguments, **keywords)
        except Exception as error:
            failure = error
    outcome: list[Any] = [result, failure and _as_one_line(failure)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    result, sent = outcome
    if sent is not None:
        sent.is_on_every_rank = True
        raise failure or sent
    return cast("_T", result)


def on_each_disk(
    group: dist.ProcessGroup, disks: Disks, action: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs
) -> _T:
    """Run `action` on one rank of every disk, and return the result of this rank's disk. Collective.

    When one fails, all ranks raise, on a shared disk as `on_main_rank` does, else as `vote` does.
    """
    if disks.is_one:
        return on_main_rank(group, action, *arguments, **keywords)
    rank = dist.get_rank(group)
    main = disks.mains[rank]
    result = on_all_ranks(group, lambda: action(*arguments, **keywords) if rank == main else None)
    return cast("_T", gather(group, result)[main])


def gather(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """Return every rank's value, in rank order, on every rank; sent as pickles. Collective."""
    values: list[_T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _as_one_line(failure: Exception) -> LlmscaleError:
    """Convert an exception for the ranks that have no traceback of it."""
    if isinstance(failure, LlmscaleError):
        return failure
    return MachineError(f"unexpected {type(failure).__name__}: {failure}")


def _raise_on_all_ranks(group: dist.ProcessGroup, failure: Exception | None) -> None:
    errors = gather(group, None if failure is None else _as_one_line(failure))
    if failure is not None and not isinstance(failure, LlmscaleError):
        raise failure
    texts: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            texts.setdefault(str(error), []).append(rank)
    summary = "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in texts.items())
    if not all(error is None or error.is_transient for error in errors):
        kinds = {type(error) for error in errors if error is not None}
        raise (kinds.pop() if len(kinds) == 1 else DataError)(summary)
    machine_error = MachineError(summary)
    machine_error.is_on_every_rank = True
    raise machine_error
