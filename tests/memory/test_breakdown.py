"""Sums of categories, and what the allocator rounds."""

from __future__ import annotations

import pytest

from llmscale.memory.breakdown import Breakdown, allocated_bytes


def test_total_is_the_sum_of_all_categories() -> None:
    assert Breakdown(1, 2, 4, 8, 16, 32, 64).total_bytes == 127


def test_addition_by_category() -> None:
    states, activations = Breakdown(parameters_bytes=5, buckets_bytes=1), Breakdown(activations_bytes=7)
    both = states + activations
    assert (both.parameters_bytes, both.activations_bytes, both.total_bytes) == (5, 7, 13)


def test_as_dict_names_every_category() -> None:
    values = Breakdown(logits_bytes=3).as_dict()
    assert values["logits_bytes"] == 3
    assert sum(values.values()) == 3


@pytest.mark.parametrize(("elements", "width", "expected"), [(0, 4, 0), (1, 4, 512), (128, 4, 512), (129, 4, 1024)])
def test_allocations_are_multiples_of_512_bytes(elements: int, width: int, expected: int) -> None:
    assert allocated_bytes(elements, width) == expected
