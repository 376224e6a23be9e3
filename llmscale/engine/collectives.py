"""What all ranks must decide together, once per step: stop now, or fail together. Never one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from llmscale.errors import DataError, LlmscaleError, MachineError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Verdict:
    """What the ranks agreed on at a step boundary."""

    stop: bool
    """At least one rank was asked to stop."""
    save: bool
    """The main rank's clock says that a checkpoint is due."""
    ids_sum: int
    """Sum over ranks of the sample-id checksums, modulo 2^62."""


def agree(
    group: dist.ProcessGroup,
    *,
    stop: bool,
    save: bool = False,
    ids_checksum: int = 0,
    failure: LlmscaleError | None = None,
) -> Verdict:
    """One small all-reduce over the host-side group. Collective: every rank must call it at the same boundary.

    When any rank reports a failure, every rank raises DataError with the text of all that failed, or MachineError when
    nothing else failed anywhere: one clear error everywhere, and nobody waits for a peer that is gone.
    """
    votes = torch.tensor([int(stop), int(save), int(failure is not None), ids_checksum % 2**62], dtype=torch.int64)
    dist.all_reduce(votes, group=group)
    if votes[2]:
        _raise_together(group, failure)
    return Verdict(bool(votes[0]), bool(votes[1]), int(votes[3]) % 2**62)


def together(group: dist.ProcessGroup, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank; when it raises on any, every rank raises. Collective.

    What nobody foresaw keeps its traceback on the rank where it happened; the others raise MachineError.
    """
    result, failure, unforeseen = None, None, None
    try:
        result = action()
    except LlmscaleError as error:
        failure = error
    except Exception as error:
        failure, unforeseen = MachineError(f"unexpected {type(error).__name__}: {error}"), error
    try:
        agree(group, stop=False, failure=failure)
    except LlmscaleError:
        if unforeseen is None:
            raise
    if unforeseen is not None:
        raise unforeseen
    return cast("_T", result)


def on_main_rank(group: dist.ProcessGroup, action: Callable[[], object]) -> None:
    """Run `action` on the main rank; when it raises an LlmscaleError there, every rank raises. Collective."""
    together(group, action if dist.get_rank(group) == 0 else lambda: None)


def _raise_together(group: dist.ProcessGroup, failure: LlmscaleError | None) -> None:
    own = None if failure is None else (str(failure), isinstance(failure, MachineError))
    failures: list[tuple[str, bool] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, own, group=group)
    told = [(rank, *failed) for rank, failed in enumerate(failures) if failed is not None]
    texts: dict[str, list[int]] = {}
    for rank, text, _ in told:
        texts.setdefault(text, []).append(rank)
    summary = "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in texts.items())
    if not all(is_machines for _, _, is_machines in told):
        raise DataError(summary)
    error = MachineError(summary)
    error.is_on_every_rank = True
    raise error
