from __future__ import annotations

import numpy as np

from llmscale.data.order.sample_order import SampleOrder, SkippingOrder, join_ranges, stream_positions


def test_what_is_left_out_is_as_if_it_had_never_been_there() -> None:
    order = SampleOrder([500], seed=1)
    skipped = ((0, 3), (10, 20), (990, 1010))
    all_ids = order.sample_ids(np.arange(1500))
    remaining = np.delete(all_ids, np.concatenate([np.arange(begin, end) for begin, end in skipped]))
    assert SkippingOrder(order, skipped).sample_ids(np.arange(len(remaining))).tolist() == remaining.tolist()


def test_without_ranges_nothing_moves() -> None:
    assert stream_positions(np.arange(5), ()).tolist() == [0, 1, 2, 3, 4]


def test_ranges_that_touch_are_one() -> None:
    assert join_ranges([(8, 9), (0, 4), (2, 5), (5, 6)]) == ((0, 6), (8, 9))
