"""Whether to try again after an attempt has failed, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmscale.cluster.launch.attempt_log import Attempt

#: Before the first restart; doubles with each that brought no new step.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of what is tried."""

    max_restarts: int = 20
    """Over one launch."""
    same_step_limit: int = 3
    """Attempts in a row that end after the same step before it is taken for a fault of the run itself."""


@dataclass(frozen=True)
class Decision:
    """What to do next."""

    wait_s: float = 0.0
    give_up: str | None = None
    """Why it is no use; None to try again after `wait_s`."""


def decide(attempts: Sequence[Attempt], policy: RetryPolicy) -> Decision:
    """After the last of `attempts`, those of this launch, has failed."""
    last = attempts[-1]
    same = 0
    for attempt in reversed(attempts):
        if (attempt.last_step, attempt.end) != (last.last_step, last.end):
            break
        same += 1
    if same >= policy.same_step_limit:
        where = "before its first step" if last.last_step is None else f"after step {last.last_step}"
        return Decision(give_up=f"{same} attempts in a row ended {where} ({last.end}: {last.reason})")
    if len(attempts) > policy.max_restarts:
        return Decision(give_up=f"{policy.max_restarts} restarts were not enough (--max-restarts)")
    return Decision(wait_s=min(FIRST_WAIT_S * 2 ** _fruitless(attempts), LONGEST_WAIT_S))


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """How many attempts at the end have brought no step beyond those before them."""
    furthest, fruitless = -1, 0
    for attempt in attempts:
        reached = -1 if attempt.last_step is None else attempt.last_step
        fruitless = 0 if reached > furthest else fruitless + 1
        furthest = max(furthest, reached)
    return fruitless
