from __future__ import annotations

import re

import pytest

from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.errors import ConfigError


@pytest.mark.parametrize("sequence_parallel_size", [0, 3, 16])
def test_groups_that_do_not_divide_the_ranks_are_refused(sequence_parallel_size: int) -> None:
    with pytest.raises(ConfigError, match="8 ranks cannot be divided"):
        ParallelLayout(8, sequence_parallel_size)


def test_groups_share_a_batch_with_fillers() -> None:
    plan = build_batch_plan(global_batch_size=10, ranks=ParallelLayout(8, 2), seq_len=8)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (1, 3)
    assert plan.train_batch_size == 12 * 2
    with pytest.raises(
        ConfigError, match=r"4 groups of 2 ranks. Use at most 6 ranks, or give --global-batch-size 4 or"
    ):
        build_batch_plan(global_batch_size=3, ranks=ParallelLayout(8, 2), seq_len=8)


@pytest.mark.parametrize(
    ("ranks_per_node", "size", "groups"),
    [((8, 8), 1, (8, 8)), ((8, 8), 4, (2, 2)), ((8, 8), 16, (1,)), ((2, 2, 2), 3, (1, 1)), ((3, 3), 2, (2, 1))],
)
def test_a_group_belongs_to_the_node_of_its_first_rank(
    ranks_per_node: tuple[int, ...], size: int, groups: tuple[int, ...]
) -> None:
    ranks = ParallelLayout(sum(ranks_per_node), size)
    assert ranks.groups_per_node(ranks_per_node) == groups
    assert sum(groups) == ranks.data_parallel_size
    assert [ranks.group_of(rank) for rank in range(ranks.world_size) if ranks.is_first(rank)] == list(
        range(sum(groups))
    )


@pytest.mark.parametrize(
    ("size", "n_head", "n_kv_head", "heads", "words"),
    [
        (2, 8, 4, (4, 2), "2 of 4 key-value heads"),
        (4, 8, 2, (2, 1), r"1 of 4 key-value heads \(2 repeated to 4\)"),
        (4, 24, 6, (6, 3), r"3 of 12 key-value heads \(6 repeated to 12\)"),
    ],
)
def test_key_value_heads_are_divided_or_repeated(
    size: int, n_head: int, n_kv_head: int, heads: tuple[int, int], words: str
) -> None:
    ranks = ParallelLayout(8, size)
    assert ranks.heads_of_rank(n_head, n_kv_head) == heads
    assert re.search(words, ranks.describe_split(10, n_head, n_kv_head))


def test_query_heads_that_cannot_be_divided_are_refused_with_the_legal_sizes() -> None:
    with pytest.raises(ConfigError, match=r"4 does not divide the 6 query heads.* on 8 ranks: 1, 2\."):
        ParallelLayout(8, 4).heads_of_rank(6, 6)


def test_micro_batches_hold_the_tokens_of_a_rank() -> None:
    sizes = [
        build_batch_plan(global_batch_size=8, ranks=ParallelLayout(8, split), seq_len=16384).micro_batch_size
        for split in (1, 2, 8)
    ]
    assert sizes == [1, 2, 8]


def test_experts_are_divided_evenly_over_neighbouring_ranks() -> None:
    ranks = ParallelLayout(8, expert_parallel_size=4)
    assert (ranks.experts_of_rank(16), ranks.expert_shard_ranks) == (4, 2)
    assert ParallelLayout(8).experts_of_rank(0) == 0
    with pytest.raises(ConfigError, match=r"groups of 3 that share experts.*Legal --expert-parallel-size: 1, 2, 4, 8"):
        ParallelLayout(8, expert_parallel_size=3)
    with pytest.raises(ConfigError, match=r"4 does not divide the 6 experts.*on 8 ranks: 1, 2"):
        ranks.experts_of_rank(6)
    with pytest.raises(ConfigError, match=r"4 has no effect on a model without experts.*--num-experts"):
        ranks.experts_of_rank(0)
