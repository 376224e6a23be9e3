"""What is resumed besides tensors."""

from __future__ import annotations

import json

import pytest

from llmscale.checkpoint.run_state import RunState, parse_run_state
from llmscale.errors import CheckpointError

IDENTITY = {"global_batch_size": 8, "seq_len": 32, "data": "abc", "seed": 1, "order": {"shuffle": True, "block": 4}}


def test_survives_json() -> None:
    state = RunState(3, 24, 768, 1, IDENTITY, "fp16", {"decay": {"step": 2.0}}, {"cur_scale": 8})
    stored = json.loads(json.dumps(state.as_dict()))
    assert parse_run_state(stored, "state.json") == state
    assert parse_run_state({**stored, "optimizer_groups": {"decay": {"lr": 0.1}}}, "state.json") == state, (
        "older checkpoints"
    )


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^state\.json holds flux, which this version does not know"):
        parse_run_state({"flux": 1}, "state.json")
    with pytest.raises(CheckpointError, match=r"^state\.json: samples_seen is missing"):
        parse_run_state({"step": 1}, "state.json")
