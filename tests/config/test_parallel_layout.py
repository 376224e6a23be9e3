from __future__ import annotations

import pytest

from llmscale.config.batch_plan import build_batch_plan
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.errors import ConfigError


@pytest.mark.parametrize(("sequence_parallel_size", "data_parallel_size"), [(1, 8), (2, 4), (8, 1)])
def test_ranks_that_share_a_sequence_are_one_data_parallel_rank(
    sequence_parallel_size: int, data_parallel_size: int
) -> None:
    ranks = ParallelLayout(8, sequence_parallel_size)
    assert (ranks.data_parallel_size, ranks.shard_ranks) == (data_parallel_size, 8)
    plan = build_batch_plan(global_batch_size=16, ranks=ranks, seq_len=8, micro_batch_size=2)
    assert plan.gradient_accumulation_steps == 8 // data_parallel_size


@pytest.mark.parametrize("sequence_parallel_size", [0, 3, 16])
def test_groups_that_do_not_divide_the_ranks_are_refused(sequence_parallel_size: int) -> None:
    with pytest.raises(ConfigError, match="8 ranks cannot be divided"):
        ParallelLayout(8, sequence_parallel_size)


def test_legal_world_sizes_are_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"Legal world sizes for it: 2, 4, 10, 20\."):
        build_batch_plan(global_batch_size=10, ranks=ParallelLayout(8, 2), seq_len=8)
