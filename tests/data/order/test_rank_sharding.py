from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.order.sample_order import RankLayout, shard_batch
from llmscale.errors import ConfigError

LAYOUTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def _shares(positions: np.ndarray, rows: np.ndarray, nodes: tuple[int, ...]) -> list[np.ndarray]:
    return [shard_batch(positions, rows, RankLayout(rank, nodes)) for rank in range(sum(nodes))]


@given(LAYOUTS, st.integers(1, 4), st.integers(0, 10**9), st.integers(1, 50))
def test_every_layout_is_an_exact_partition(nodes: list[int], per_rank: int, start: int, num_rows: int) -> None:
    positions = np.arange(start, start + per_rank * sum(nodes))
    shares = _shares(positions, positions % num_rows, tuple(nodes))
    assert {len(share) for share in shares} == {per_rank}
    assert np.array_equal(np.sort(np.concatenate(shares)), positions)


@pytest.mark.parametrize("nodes", [(1,), (2, 2), (1, 1, 1), (8,) * 6, (2, 1), (4, 2, 2)])
def test_nodes_keep_to_their_rows(nodes: tuple[int, ...]) -> None:
    """Where the layout divides 48 rows, over several batches, whatever the position they start at."""
    rows_of_node: list[set[int]] = [set() for _ in nodes]
    node_of_rank = np.repeat(np.arange(len(nodes)), nodes)
    world = sum(nodes)
    for step in range(50):
        positions = np.arange(step * world * 2, (step + 1) * world * 2)
        for rank, share in enumerate(_shares(positions, positions % 48, nodes)):
            rows_of_node[node_of_rank[rank]].update((share % 48).tolist())
    assert sum(len(rows) for rows in rows_of_node) == 48
    assert [len(rows) for rows in rows_of_node] == [48 * ranks // world for ranks in nodes]
    assert 0 in rows_of_node[0], "after an update, too, nodes have the shards of their rows in their caches"


@given(LAYOUTS, st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**9), st.integers(1, 50))
def test_any_number_of_ranks_gets_whole_micro_batches(
    nodes: list[int], unit: int, count: int, start: int, num_rows: int
) -> None:
    positions = np.arange(start, start + count * unit)
    layouts = [RankLayout(rank, tuple(nodes)) for rank in range(sum(nodes))]
    shares = [shard_batch(positions, positions % num_rows, layout, unit) for layout in layouts]
    sizes = [len(share) for share in shares]
    assert all(size % unit == 0 for size in sizes) and max(sizes) - min(sizes) <= unit
    assert np.array_equal(np.sort(np.concatenate(shares)), positions)


def test_a_batch_of_broken_micro_batches_is_refused() -> None:
    positions = np.arange(8)
    with pytest.raises(ConfigError, match="8 samples is not a number of micro-batches of 3"):
        shard_batch(positions, positions, RankLayout(0, (3,)), unit=3)


@pytest.mark.parametrize(
    ("rank", "nodes", "text"), [(2, (2,), "rank must be in 0..1"), (0, (2, 0), "at least one rank")]
)
def test_impossible_layouts_are_refused(rank: int, nodes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RankLayout(rank, nodes)
