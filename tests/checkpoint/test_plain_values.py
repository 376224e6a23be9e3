"""Values that a checkpoint keeps come back with their types."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from llmscale.checkpoint.plain_values import from_json, to_json
from llmscale.errors import CheckpointError

KEYS = some.one_of(some.text(), some.integers(), some.booleans(), some.none())
VALUES = some.recursive(
    some.one_of(some.none(), some.booleans(), some.integers(), some.floats(allow_nan=False), some.text()),
    lambda inner: some.one_of(some.lists(inner), some.tuples(inner, inner), some.dictionaries(KEYS, inner)),
    max_leaves=12,
)


@given(VALUES)
def test_values_survive_json(value: object) -> None:
    again = from_json(json.loads(json.dumps(to_json(value, "value"))))
    assert again == value
    assert repr(again) == repr(value)


def test_a_schedule_with_milestones_reaches_them() -> None:
    def build() -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3])

    one, other = build(), build()
    one.optimizer.step()
    one.step()
    other.load_state_dict(from_json(json.loads(json.dumps(to_json(one.state_dict(), "schedule")))))
    for schedule in (one, other):
        schedule.optimizer.step()
        schedule.step()
        schedule.step()
    assert other.get_last_lr() == one.get_last_lr()
    assert isinstance(other.milestones, Counter)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_numbers_of_libraries_become_plain() -> None:
    assert to_json({"a": np.float32(0.5), "b": torch.tensor(3)}, "extra") == {"a": 0.5, "b": 3}
    loop: list[object] = []
    loop.append(loop)
    for wrong in (torch.ones(2), object(), {1, 2}, loop):
        with pytest.raises(CheckpointError, match="extra"):
            to_json(wrong, "extra")


@pytest.mark.parametrize("damaged", [{"__tuple__": 3}, {"__pairs__": [1]}, {"__counter__": [[[], 1]]}])
def test_a_damaged_value_is_refused(damaged: object) -> None:
    with pytest.raises(CheckpointError, match="a saved value is damaged"):
        from_json(damaged)
