"""What is resumed besides tensors, and what may not have changed."""

from __future__ import annotations

import json

import pytest

from llmscale.checkpoint.run_state import RunState, check_identity, parse_run_state
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


def test_the_same_run_passes() -> None:
    assert check_identity(IDENTITY, dict(IDENTITY), []) == []


@pytest.mark.parametrize(
    ("key", "now", "text"),
    [
        ("global_batch_size", 16, "global_batch_size was 8 and is 16"),
        ("seq_len", 64, "seq_len was 32 and is 64"),
        ("data", "xyz", "data was 'abc' and is 'xyz'"),
        ("seed", 2, "seed was 1 and is 2"),
        ("order", {"shuffle": False, "block": 4}, "order was {'shuffle': True} and is {'shuffle': False}"),
    ],
)
def test_a_change_is_refused_with_both_values_or_allowed_with_its_price(key: str, now: object, text: str) -> None:
    changed = {**IDENTITY, key: now}
    with pytest.raises(CheckpointError) as refusal:
        check_identity(IDENTITY, changed, [])
    assert text in str(refusal.value)
    assert f"--allow-changed {key}" in str(refusal.value)
    (warning,) = check_identity(IDENTITY, changed, [key])
    assert text in warning
    with pytest.raises(CheckpointError):
        check_identity(IDENTITY, changed, ["global_batch_size" if key != "global_batch_size" else "seed"])
