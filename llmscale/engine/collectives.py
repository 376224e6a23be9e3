"""What all ranks do together on the host, or fail together: never one rank alone. The one failure protocol.

An error that is meant for the user reaches every rank. What nobody foresaw keeps its traceback on the rank where it
happened; the others raise MachineError, so that nobody waits for a peer that is gone. All groups are host-side (gloo).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from llmscale.errors import DataError, LlmscaleError, MachineError

_T = TypeVar("_T")


@dataclass(frozen=True)
class StepVote:
    """What the ranks agreed on at a step boundary."""

    stop: bool
    """At least one rank was asked to stop."""
    save: bool
    """The main rank's clock says that a checkpoint is due."""
    rollback: bool
    """The main rank saw a spike that the run is to go back from."""
    ids_sum: int
    """Sum over ranks of the sample-id checksums, modulo 2^62."""


def vote(
    group: dist.ProcessGroup,
    *,
    stop: bool = False,
    save: bool = False,
    rollback: bool = False,
    ids_checksum: int = 0,
    failure: Exception | None = None,
) -> StepVote:
    """One small all-reduce. Collective: every rank must call it at the same boundary.

    When any rank reports a failure, every rank raises DataError with the text of all that failed, or MachineError when
    nothing else failed anywhere; a rank whose own failure nobody foresaw raises that one.
    """
    votes = torch.tensor(
        [int(stop), int(save), int(failure is not None), ids_checksum % 2**62, int(rollback)], dtype=torch.int64
    )
    dist.all_reduce(votes, group=group)
    if votes[2]:
        _raise_together(group, failure)
    return StepVote(bool(votes[0]), bool(votes[1]), bool(votes[4]), int(votes[3]) % 2**62)


def on_all_ranks(group: dist.ProcessGroup, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank, and return what it returned here; when it raises on any, every rank raises, as in
    `vote`. Collective."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    vote(group, failure=failure)
    return cast("_T", result)


def on_main_rank(group: dist.ProcessGroup, action: Callable[[], _T]) -> _T:
    """Run `action` on the main rank alone: every rank returns what it returned, or raises what it raised. Collective.

    What it returns goes over the network as a pickle.
    """
    result, failure = None, None
    if dist.get_rank(group) == 0:
        try:
            result = action()
        except Exception as error:
            failure = error
    outcome: list[Any] = [result, failure and _for_the_others(failure)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    result, told = outcome
    if isinstance(told, MachineError):
        told.is_on_every_rank = True
    if told is not None:
        raise failure or told
    return cast("_T", result)


def gather(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """Every rank's value, in rank order, on every rank; pickled. Collective."""
    values: list[_T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _for_the_others(failure: Exception) -> LlmscaleError:
    """One line for the ranks that have no traceback of it."""
    if isinstance(failure, LlmscaleError):
        return failure
    return MachineError(f"unexpected {type(failure).__name__}: {failure}")


def _raise_together(group: dist.ProcessGroup, failure: Exception | None) -> None:
    told = gather(group, failure and _for_the_others(failure))
    if failure is not None and not isinstance(failure, LlmscaleError):
        raise failure
    texts: dict[str, list[int]] = {}
    for rank, error in enumerate(told):
        if error is not None:
            texts.setdefault(str(error), []).append(rank)
    summary = "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in texts.items())
    if not all(error is None or isinstance(error, MachineError) for error in told):
        raise DataError(summary)
    of_all = MachineError(summary)
    of_all.is_on_every_rank = True
    raise of_all
