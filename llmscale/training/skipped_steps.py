"""`--skip-steps A:B`: the batches of steps A up to, not including, B are left out of the stream, for good.

Several are applied in their order, each to the steps as they are after those before it: of two ranges read from one log
the later one is given first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from llmscale.checkpoint.run_state import RunState
from llmscale.config.command_line import parse_step_range
from llmscale.data.order.sample_order import MOST_POSITIONS, Ranges, join_ranges, stream_positions
from llmscale.errors import CheckpointError, ConfigError

#: The key of a run's identity under which a checkpoint keeps what its run leaves out.
SKIPPED_KEY = "skipped"


@dataclass(frozen=True)
class Skip:
    """A range that a run leaves out."""

    steps: str
    """As it was asked for, A:B: the same flag on a later start means this range and no further one."""
    begin: int
    """Stream position of the first sample that is left out."""
    end: int
    """Behind the last one."""


def parse_skip(text: str) -> tuple[int, int]:
    """(A, B). Raises ConfigError."""
    return parse_step_range("--skip-steps", text, "the batches are left out")


def place_skips(wanted: Sequence[str], state: RunState | None, global_batch_size: int) -> tuple[Skip, ...]:
    """What the run has left out so far, and what it is to leave out of the steps to come. Raises ConfigError for steps
    that are done, CheckpointError for a checkpoint that holds no such ranges."""
    skips = list(saved_skips(state.identity)) if state else []
    step, seen = (state.step, state.samples_seen) if state else (0, 0)
    known = {skip.steps for skip in skips}
    for text in wanted:
        first, behind = parse_skip(text)
        name = f"{first}:{behind}"
        if name in known:
            continue
        if first <= step:
            raise ConfigError(
                f"--skip-steps {name}: step {first} is done, the checkpoint is at step {step}. Name steps from "
                f"{step + 1} on, or go back to a checkpoint before step {first} with --resume."
            )
        # Of the steps as they would be without this flag: their first sample, and their last.
        ends = [seen + (first - 1 - step) * global_batch_size, seen + (behind - 1 - step) * global_batch_size - 1]
        if max(ends) >= MOST_POSITIONS - sum(end - begin for begin, end in ranges(skips)):
            raise ConfigError(
                f"--skip-steps {name}: with {global_batch_size:,} samples a step that is beyond any run. Name steps "
                "that the run has."
            )
        begin, last = stream_positions(np.array(ends), ranges(skips)).tolist()
        skips.append(Skip(name, begin, last + 1))
        known.add(name)
    return tuple(skips)


def check_skips(wanted: Sequence[str], state: RunState | None, total_steps: int, is_restart: bool) -> None:
    """Raise ConfigError for a range that leaves nothing out. A restart repeats the flags of the first start."""
    known = {} if state is None or is_restart else dict.fromkeys(skip.steps for skip in saved_skips(state.identity))
    for text in wanted:
        first, behind = parse_skip(text)
        name = f"{first}:{behind}"
        if name in known:
            raise ConfigError(
                f"--skip-steps {name}: the run leaves these steps out already, and the flag would do nothing. Drop it; "
                f"to leave out what those steps are now, name another range, such as {first}:{behind + 1}."
            )
        if first > total_steps:
            raise ConfigError(
                f"--skip-steps {name}: the run ends at step {total_steps}, and the flag would do nothing. Name steps "
                "that the run has, or give more --steps."
            )
        known[name] = None


def ranges(skips: Sequence[Skip]) -> Ranges:
    """Of stream positions, ascending and apart."""
    return join_ranges((skip.begin, skip.end) for skip in skips)


def saved_skips(identity: Mapping[str, object]) -> tuple[Skip, ...]:
    """What a checkpoint's run left out. Raises CheckpointError."""
    listed = identity.get(SKIPPED_KEY, [])
    try:
        skips = tuple(Skip(**entry) for entry in listed)  # type: ignore[attr-defined]
        if all(
            isinstance(skip.steps, str)
            and type(skip.begin) is type(skip.end) is int
            and 0 <= skip.begin < skip.end <= MOST_POSITIONS
            for skip in skips
        ):
            return skips
    except TypeError:
        pass
    raise CheckpointError(f"the checkpoint's state is damaged: {SKIPPED_KEY} is {str(listed)[:80]!r}.")


def as_plain_skips(skips: Sequence[Skip]) -> list[dict[str, object]]:
    """The inverse of `saved_skips`."""
    return [asdict(skip) for skip in skips]
