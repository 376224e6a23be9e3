"""Which samples a run sees, through changes of the batch size and steps that are left out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from llmscale.checkpoint.run_state import RunState
from llmscale.errors import CheckpointError, ConfigError
from llmscale.training.sample_stream import (
    SKIPPED_KEY,
    SampleStream,
    Skip,
    build_stream,
    place_skips,
    saved_batches,
    saved_skips,
    skipped_ranges,
)
from llmscale.training.start import Start
from tests.training.test_inputs import prepare


def place(wanted: list[str], state: RunState | None, size: int) -> tuple[Skip, ...]:
    """`place_skips` with batches of one size from the state on."""
    return place_skips(wanted, state, ((state.step, state.samples_seen, size) if state else (0, 0, size),))


def state_at(stream: SampleStream, step: int, batch: int) -> RunState:
    identity = json.loads(json.dumps({**stream.identity, "global_batch_size": batch}))
    return RunState(step, stream.samples_after(step), 0, 0, identity, "fp32", {})


def stream_after(start: Start, state: RunState) -> SampleStream:
    return build_stream(start.config, start.sets, start.resolved, state)


def test_what_is_announced_is_what_will_have_been_seen(tiny_set: Path, tmp_path: Path) -> None:
    """Two sets of the same content, 8 a step until step 5, 4 from there on, steps 3 and 9 left out."""
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"sets: {{a: {tiny_set}, b: {tiny_set}}}\nweights: {{a: 3, b: 1}}\n")
    flags = (f"--data={mix}", "--steps=12")
    begun = prepare(tiny_set, tmp_path, *flags, "--skip-steps=3:4").stream
    run = prepare(tiny_set, tmp_path, *flags, "--global-batch-size=4", "--skip-steps=9:10")
    stream = stream_after(run, state_at(begun, 5, 8))
    assert stream.batches == ((0, 0, 8), (5, 40, 4))
    assert [stream.samples_after(step) for step in (0, 4, 5, 6, 12)] == [0, 32, 40, 44, 68]
    ids = stream.order.sample_ids(np.arange(68))
    drawn = np.bincount(stream.set_of(ids), minlength=2).tolist()
    assert stream.samples_by_set(68).tolist() == drawn
    assert [entry["samples"] for entry in stream.identity["sets"].values()] == drawn
    assert saved_batches(state_at(stream, 9, 4)) == stream.batches
    again = stream_after(prepare(tiny_set, tmp_path, *flags, "--global-batch-size=2"), state_at(stream, 5, 4))
    assert again.batches == ((0, 0, 8), (5, 40, 2)), "no step was done with batches of 4"


def test_malformed_batches_are_refused(tiny_set: Path, tmp_path: Path) -> None:
    stream = prepare(tiny_set, tmp_path).stream
    state = state_at(stream, 5, 8)
    for damaged in (None, [], [[0, 0]], [[0, 0, 0]], [[0, -1, 8]], [[1, 8, 8]], "8"):
        state.identity["batches"] = damaged
        with pytest.raises(CheckpointError, match="damaged: batches"):
            saved_batches(state)


STATE = RunState(
    step=10, samples_seen=80, tokens_seen=0, skipped_steps=0, identity={}, precision="fp32", optimizer_scalars={}
)


def with_skips(*skips: Skip) -> RunState:
    return replace(STATE, identity={SKIPPED_KEY: [asdict(skip) for skip in skips]})


def test_steps_are_numbered_as_they_are_printed() -> None:
    """The first step is 1, and B itself is not left out."""
    assert place(["1:2", "5:7"], None, 8) == (Skip("1:2", 0, 8), Skip("5:7", 40, 56))


def test_a_run_that_goes_on_keeps_what_it_left_out_whatever_the_command_says() -> None:
    earlier = (Skip("3:5", 16, 32),)
    assert place([], with_skips(*earlier), 8) == earlier
    assert place(["3:5"], with_skips(*earlier), 8) == earlier, "the same command again"


def test_what_comes_is_counted_from_the_checkpoint() -> None:
    assert place(["12:14"], STATE, 8)[0] == Skip("12:14", 88, 104)
    assert place(["12:14"], STATE, 16)[0] == Skip("12:14", 96, 128), "another batch size since"
    earlier = Skip("3:5", 16, 32)
    assert place(["12:14"], with_skips(earlier), 8) == (earlier, Skip("12:14", 104, 120)), "behind what is gone"


def test_a_range_that_begins_before_one_that_is_gone_reaches_behind_it() -> None:
    """Steps 2 and 3 as they are printed: the second one comes behind what is left out."""
    earlier = Skip("3:5", 16, 32)
    state = replace(with_skips(earlier), step=1, samples_seen=8)
    assert skipped_ranges(place(["2:4"], state, 8)) == ((8, 40),)


def test_steps_that_are_done_cannot_be_left_out() -> None:
    with pytest.raises(ConfigError, match=r"step 10 is done.*from 11 on.*--resume"):
        place(["10:12"], STATE, 8)


def test_steps_beyond_what_a_checkpoint_can_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="beyond any run"):
        place(["1:999999999999"], None, 1 << 30)


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "0:3", "-1:3", "a:b", "1:2:3", "1.5:2", "9" * 13 + ":1"])
def test_what_is_no_range_is_said_with_what_is_one(text: str) -> None:
    with pytest.raises(ConfigError, match="1000:1010"):
        place([text], None, 8)


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
    assert skipped_ranges([Skip("1:4", 0, 24), Skip("3:6", 16, 40)]) == ((0, 40),)
