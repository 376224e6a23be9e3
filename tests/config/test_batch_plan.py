"""Any number of ranks divides a global batch, with the fewest fillers; and what the errors propose is legal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.config.batch_plan import (
    DEFAULT_MICRO_BATCH_TOKENS,
    BatchRamp,
    LengthRamp,
    ParallelLayout,
    build_batch_plan,
    divisors,
)
from llmscale.errors import ConfigError


@given(st.integers(1, 300), st.data(), st.integers(1, 20_000))
def test_the_default_micro_batch_has_the_fewest_fillers(total: int, data: st.DataObject, seq_len: int) -> None:
    ranks = ParallelLayout(data.draw(st.integers(1, total)))
    request = {"global_batch_size": total, "ranks": ranks, "seq_len": seq_len}
    plan = build_batch_plan(**request)
    others = [build_batch_plan(**request, micro_batch_size=size) for size in divisors(total)]
    assert plan.filler_share == min(other.filler_share for other in others)
    as_cheap = [other for other in others if other.filler_share == plan.filler_share]
    fitting = [other for other in as_cheap if other.tokens_per_forward <= DEFAULT_MICRO_BATCH_TOKENS]
    assert plan == (fitting or as_cheap)[-1 if fitting else 0]


@given(st.integers(1, 300), st.data())
def test_every_micro_batch_that_divides_the_batch_trains_on_any_number_of_ranks(
    total: int, data: st.DataObject
) -> None:
    ranks, micro = data.draw(st.integers(1, total)), data.draw(st.sampled_from(divisors(total)))
    plan = build_batch_plan(global_batch_size=total, ranks=ParallelLayout(ranks), seq_len=8, micro_batch_size=micro)
    computed = plan.micro_batch_size * plan.gradient_accumulation_steps * ranks
    assert 0 <= computed - total < micro * ranks
    assert plan.train_batch_size == computed == pytest.approx(total * (1 + plan.filler_share))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 50))
def test_whatever_is_refused_gets_a_legal_proposal(total: int, world_size: int, micro: int) -> None:
    request = {"global_batch_size": total, "ranks": ParallelLayout(world_size), "seq_len": 8, "micro_batch_size": micro}
    try:
        build_batch_plan(**request)
        assert world_size <= total and total % micro == 0
    except ConfigError as error:
        text = str(error)
        if "Use at most" in text:
            assert world_size > total
            for legal in numbers(text, r"Use at most (\d+) ranks"):
                build_batch_plan(**{**request, "ranks": ParallelLayout(legal), "micro_batch_size": None})
            for legal in numbers(text, r"give --global-batch-size (\d+) or more"):
                build_batch_plan(**{**request, "global_batch_size": legal, "micro_batch_size": None})
        else:
            assert total % micro
            for legal in numbers(text, r"Legal micro-batches: ([\d, .]+)\."):
                build_batch_plan(**{**request, "micro_batch_size": legal})


def numbers(text: str, pattern: str) -> list[int]:
    actual = re.search(pattern, text)
    assert actual, text
    return [int(number) for number in re.findall(r"\d+", actual.group(1))]


def test_the_description_spells_the_multiplication_out() -> None:
    plan = build_batch_plan(global_batch_size=64, ranks=ParallelLayout(4), seq_len=128, micro_batch_size=8)
    assert plan.describe() == (
        "global batch 64 sequences = 8 micro-batch x 2 accumulation x 4 ranks = 8,192 tokens per step"
    )
    plan = build_batch_plan(global_batch_size=64, ranks=ParallelLayout(7), seq_len=128)
    assert plan.describe() == (
        "global batch 64 sequences = 2 micro-batch x 5 accumulation x 7 ranks - 3 fillers (9% more work) "
        "= 8,192 tokens per step"
    )


@given(st.integers(1, 8), st.integers(2, 20), st.integers(1, 3000), st.integers(0, 400))
def test_a_ramp_grows_linearly_and_is_the_same_from_any_step(first: int, parts: int, samples: int, step: int) -> None:
    ramp = BatchRamp(first, samples)
    plan = build_batch_plan(global_batch_size=first * parts, ranks=ParallelLayout(first), seq_len=8, ramp=ramp)
    seen = 0
    for done in range(step):
        assert plan.samples_after(done) == seen
        size = plan.samples_after(done + 1) - seen
        assert size % first == 0
        linear = first + (first * parts - first) * min(1, seen / samples)
        assert linear - first < size <= linear + 1e-9
        assert plan.steps_for(seen) == done
        assert plan.steps_for(seen + 1) == done + 1
        seen += size
    rows = plan.batches_from(step, seen)
    assert rows[0] == (step, seen, plan.samples_after(step + 1) - seen)
    assert rows[1:] == tuple(row for row in plan.batches_from(0, 0) if row[0] > step)
    assert rows[-1][-1] == plan.global_batch_size


@pytest.mark.parametrize(
    ("first", "ranks", "words"),
    [
        (5, 1, "batch_ramp_from 5 must divide the global batch of 16 sequences, in 2 to 1024 parts"),
        (16, 1, "Legal: 1, 2, 4, 8."),
    ],
)
def test_a_ramp_to_an_illegal_batch_is_refused(first: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_batch_plan(global_batch_size=16, ranks=ParallelLayout(ranks), seq_len=8, ramp=BatchRamp(first, 100))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("first", "ranks", "micro"),
    [(4, 8, 4), (4, 3, 2), (12, 8, 2), (8, 8, 1)],
)
def test_a_ramp_may_begin_below_the_number_of_ranks(first: int, ranks: int, micro: int) -> None:
    """The micro-batch divides the first size. Where every rank has a part of that, it has the fewest fillers, too."""
    plan = build_batch_plan(
        global_batch_size=24 * first, ranks=ParallelLayout(ranks), seq_len=8, ramp=BatchRamp(first, 100)
    )
    assert plan.micro_batch_size == micro
    assert plan.micro_steps(first) == -(-first // (micro * ranks))


def test_sequences_double_for_equal_shares_of_the_tokens() -> None:
    lengths = LengthRamp(8, 30)
    plan = build_batch_plan(global_batch_size=4, ranks=ParallelLayout(1), seq_len=64, lengths=lengths)
    assert [plan.length_after(seen) for seen in (0, 9, 10, 19, 20, 29, 30, 10**6)] == [8, 8, 16, 16, 32, 32, 64, 64]
    assert plan.describe().endswith("256 tokens per step, cut into sequences of 8 to 32 tokens until step 8")


@pytest.mark.parametrize(("first", "seq_len"), [(64, 64), (24, 64), (1, 256), (3, 7)])
def test_sequences_that_cannot_double_to_the_full_length_are_refused(first: int, seq_len: int) -> None:
    legal = {64: "Legal: 1, 2, 4, 8, 16, 32.", 256: "Legal: 2, 4, 8, 16, 32, 64, 128.", 7: "none, for an odd number"}
    words, lengths = f"seq_len_ramp_from {first} must be the dataset's {seq_len} tokens", LengthRamp(first, 10)
    with pytest.raises(ConfigError, match=words) as raised:
        build_batch_plan(global_batch_size=4, ranks=ParallelLayout(1), seq_len=seq_len, lengths=lengths)
    assert legal[seq_len] in str(raised.value)


@pytest.mark.parametrize("sequence_parallel_size", [0, 3, 16])
def test_groups_that_do_not_divide_the_ranks_are_refused(sequence_parallel_size: int) -> None:
    with pytest.raises(ConfigError, match="8 ranks cannot be divided"):
        ParallelLayout(8, sequence_parallel_size)


def test_groups_share_a_batch_with_fillers() -> None:
    plan = build_batch_plan(global_batch_size=10, ranks=ParallelLayout(8, 2), seq_len=8)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (1, 3)
    assert plan.train_batch_size == 12 * 2
    with pytest.raises(ConfigError, match="at least 1 sequence, not 0"):
        build_batch_plan(global_batch_size=0, ranks=ParallelLayout(1), seq_len=8)
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
