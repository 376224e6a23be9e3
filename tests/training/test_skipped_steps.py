from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.checkpoint.run_state import RunState
from llmscale.errors import CheckpointError, ConfigError
from llmscale.training.skipped_steps import SKIPPED_KEY, Skip, as_plain_skips, place_skips, ranges, saved_skips

STATE = RunState(
    step=10, samples_seen=80, tokens_seen=0, skipped_steps=0, identity={}, precision="fp32", optimizer_scalars={}
)


def with_skips(*skips: Skip) -> RunState:
    return replace(STATE, identity={SKIPPED_KEY: as_plain_skips(skips)})


def test_steps_are_numbered_as_they_are_printed() -> None:
    """The first step is 1, and B itself is not left out."""
    assert place_skips(["1:2", "5:7"], None, 8) == (Skip("1:2", 0, 8), Skip("5:7", 40, 56))


def test_a_run_that_goes_on_keeps_what_it_left_out_whatever_the_command_says() -> None:
    kept = (Skip("3:5", 16, 32),)
    assert place_skips([], with_skips(*kept), 8) == kept
    assert place_skips(["3:5"], with_skips(*kept), 8) == kept, "the same command again"


def test_what_comes_is_counted_from_the_checkpoint() -> None:
    assert place_skips(["12:14"], STATE, 8)[0] == Skip("12:14", 88, 104)
    assert place_skips(["12:14"], STATE, 16)[0] == Skip("12:14", 96, 128), "another batch size since"
    kept = Skip("3:5", 16, 32)
    assert place_skips(["12:14"], with_skips(kept), 8) == (kept, Skip("12:14", 104, 120)), "behind what is gone"


def test_a_range_that_begins_before_one_that_is_gone_reaches_behind_it() -> None:
    """Steps 2 and 3 as they are printed: the second one comes behind what is left out."""
    kept = Skip("3:5", 16, 32)
    state = replace(with_skips(kept), step=1, samples_seen=8)
    assert ranges(place_skips(["2:4"], state, 8)) == ((8, 40),)


def test_steps_that_are_done_cannot_be_left_out() -> None:
    with pytest.raises(ConfigError, match=r"step 10 is done.*from 11 on.*--resume"):
        place_skips(["10:12"], STATE, 8)


def test_steps_beyond_what_a_checkpoint_can_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="beyond any run"):
        place_skips(["1:999999999999"], None, 1 << 30)


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "0:3", "-1:3", "a:b", "1:2:3", "1.5:2", "9" * 13 + ":1"])
def test_what_is_no_range_is_said_with_what_is_one(text: str) -> None:
    with pytest.raises(ConfigError, match="1000:1010"):
        place_skips([text], None, 8)


@pytest.mark.parametrize(
    "damaged",
    [
        7,
        [3],
        [{"steps": "1:2"}],
        [{"steps": "1:2", "begin": 5, "end": 5}],
        [{"x": 1}],
        [{"steps": "1:2", "begin": 0, "end": 2**64}],
    ],
)
def test_a_checkpoint_that_says_nonsense(damaged: object) -> None:
    with pytest.raises(CheckpointError, match=SKIPPED_KEY):
        saved_skips({SKIPPED_KEY: damaged})


def test_ranges_may_overlap() -> None:
    assert ranges([Skip("1:4", 0, 24), Skip("3:6", 16, 40)]) == ((0, 40),)
