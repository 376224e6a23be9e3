from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.validation import (
    ValidationBatch,
    bits_per_byte,
    mean_bits_per_byte,
    validation_batches,
    validation_sample_ids,
)
from llmscale.errors import ConfigError


@pytest.fixture(scope="module")
def shards(shared_set: Path) -> TokenShards:
    return TokenShards(open_set(str(shared_set)), "val")


def _all_ranks(shards: TokenShards, world: int, micro: int, count: int | None) -> list[list[ValidationBatch]]:
    return [list(validation_batches(shards, RankLayout(rank, (world,)), micro, count)) for rank in range(world)]


@pytest.mark.parametrize("count", [None, 1, 7, 30])
@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 8), (2, 3), (3, 4), (5, 2), (8, 16)])
def test_each_sample_once_with_equal_forwards(shards: TokenShards, world: int, micro: int, count: int | None) -> None:
    ranks = _all_ranks(shards, world, micro, count)
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for each in ranks for batch in each]
    ids = np.sort(np.concatenate([batch.sample_ids.numpy() for batch in batches]))
    assert np.array_equal(ids, validation_sample_ids(len(shards), count))
    assert sum(batch.weight for batch in batches) == len(ids)
    for batch in batches:
        assert batch.weight == len(batch.sample_ids)
        assert 1 <= len(batch.tokens) <= micro
        if batch.weight:
            assert np.array_equal(batch.tokens.numpy(), shards.read(batch.sample_ids.numpy()))


def test_a_weighted_mean_is_the_same_at_every_world_size(shards: TokenShards) -> None:
    """With any per-batch mean in place of a loss."""
    means = []
    for world, micro in [(1, 4), (3, 2), (8, 5)]:
        batches = [batch for each in _all_ranks(shards, world, micro, 23) for batch in each]
        total = sum(float(batch.tokens.double().mean()) * batch.weight for batch in batches)
        means.append(total / sum(batch.weight for batch in batches))
    assert means == pytest.approx([means[0]] * 3, rel=1e-12)


def test_a_part_is_spread_over_the_split() -> None:
    assert validation_sample_ids(100, 4).tolist() == [0, 25, 50, 75]
    assert validation_sample_ids(3, 10).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="at least one sample"):
        validation_sample_ids(10, 0)


def test_bits_per_byte_are_of_the_bytes_that_the_tokens_stand_for() -> None:
    assert bits_per_byte(2 * math.log(2), 4.0) == pytest.approx(0.5)
    # 3 sequences of 1 bit and 2 bytes a token, and one of 5 bits and 4 bytes.
    losses = [(math.log(2), 3), (5 * math.log(2), 1)]
    assert mean_bits_per_byte(losses, [2.0, 4.0]) == pytest.approx(8 / 10)
