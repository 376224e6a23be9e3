"""Which samples a run sees, through changes of the batch size and steps that are left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmscale.checkpoint.run_state import RunState
from llmscale.errors import CheckpointError
from llmscale.training.run_data import SampleStream, build_stream, saved_batches
from tests.training.test_run_inputs import prepare


def state_at(stream: SampleStream, step: int, batch: int) -> RunState:
    identity = json.loads(json.dumps({**stream.identity, "global_batch_size": batch}))
    return RunState(step, stream.samples_after(step), 0, 0, identity, "fp32", {})


def test_what_is_announced_is_what_will_have_been_seen(tiny_set: Path, tmp_path: Path) -> None:
    """Two sets of the same content, 8 a step until step 5, 4 from there on, steps 3 and 9 left out."""
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"sets: {{a: {tiny_set}, b: {tiny_set}}}\nweights: {{a: 3, b: 1}}\n")
    flags = (f"--data={mix}", "--steps=12")
    begun = build_stream(prepare(tiny_set, tmp_path, *flags, "--skip-steps=3:4"), None)
    run = prepare(tiny_set, tmp_path, *flags, "--global-batch-size=4", "--skip-steps=9:10")
    stream = build_stream(run, state_at(begun, 5, 8))
    assert stream.batches == ((0, 0, 8), (5, 40, 4))
    assert [stream.samples_after(step) for step in (0, 4, 5, 6, 12)] == [0, 32, 40, 44, 68]
    ids = stream.order.sample_ids(np.arange(68))
    drawn = np.bincount(stream.set_of(ids), minlength=2).tolist()
    assert stream.drawn(68).tolist() == drawn
    assert [entry["samples"] for entry in stream.identity["sets"].values()] == drawn
    assert saved_batches(state_at(stream, 9, 4)) == stream.batches
    again = build_stream(prepare(tiny_set, tmp_path, *flags, "--global-batch-size=2"), state_at(stream, 5, 4))
    assert again.batches == ((0, 0, 8), (5, 40, 2)), "no step was done with batches of 4"


def test_batches_that_no_checkpoint_recorded_are_not_guessed(tiny_set: Path, tmp_path: Path) -> None:
    stream = build_stream(prepare(tiny_set, tmp_path), None)
    state = state_at(stream, 5, 8)
    del state.identity["batches"]
    assert saved_batches(state) == ((0, 0, 8),)
    later = build_stream(prepare(tiny_set, tmp_path), replace(state, samples_seen=44))
    assert later.samples_after(6) == 52
    with pytest.raises(CheckpointError, match="batch size of step 5"):
        later.samples_after(4)
    for damaged in (None, [[0, 0]], [[0, 0, 0]], [[0, -1, 8]], "8"):
        state.identity["batches"] = damaged
        with pytest.raises(CheckpointError, match="batches is"):
            saved_batches(state)
