"""What may not have changed on resume."""

from __future__ import annotations

import pytest

from llmscale.errors import CheckpointError
from llmscale.training.identity import check_identity

IDENTITY = {"global_batch_size": 8, "seq_len": 32, "data": "abc", "seed": 1, "order": {"shuffle": True, "block": 4}}


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
