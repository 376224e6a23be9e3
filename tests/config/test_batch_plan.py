"""micro-batch x accumulation x data-parallel size = global batch, always; and what the errors propose is legal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.config.batch_plan import DEFAULT_MICRO_BATCH_TOKENS, BatchRamp, LengthRamp, build_batch_plan
from llmscale.config.parallel_layout import ParallelLayout, divisors
from llmscale.errors import ConfigError


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16), st.integers(1, 4096))
def test_a_plan_multiplies_to_the_global_batch(world_size: int, micro: int, accumulation: int, seq_len: int) -> None:
    total = world_size * micro * accumulation
    for chosen in (micro, None):
        plan = build_batch_plan(
            global_batch_size=total, ranks=ParallelLayout(world_size), seq_len=seq_len, micro_batch_size=chosen
        )
        assert plan.micro_batch_size * plan.gradient_accumulation_steps * plan.ranks.data_parallel_size == total
        assert plan.global_batch_size == total
        assert plan.samples_per_rank == micro * accumulation
        assert plan.tokens_per_step == total * seq_len
        assert chosen in (None, plan.micro_batch_size)


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 20_000))
def test_the_default_micro_batch_is_the_largest_that_fits(world_size: int, share: int, seq_len: int) -> None:
    plan = build_batch_plan(global_batch_size=world_size * share, ranks=ParallelLayout(world_size), seq_len=seq_len)
    fits = plan.micro_batch_size * seq_len <= DEFAULT_MICRO_BATCH_TOKENS
    assert fits or plan.micro_batch_size == 1
    larger = [size for size in divisors(share) if size > plan.micro_batch_size]
    assert all(size * seq_len > DEFAULT_MICRO_BATCH_TOKENS for size in larger)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 50))
def test_whatever_cannot_be_divided_gets_a_legal_proposal(total: int, world_size: int, micro: int) -> None:
    request = {"global_batch_size": total, "ranks": ParallelLayout(world_size), "seq_len": 8, "micro_batch_size": micro}
    try:
        build_batch_plan(**request)
        assert total % (world_size * micro) == 0
    except ConfigError as error:
        assert total % (world_size * micro) != 0
        text = str(error)
        if "Legal world sizes" in text:
            for legal in numbers(text, r"Legal world sizes for it: ([\d, .]+)\. "):
                build_batch_plan(**{**request, "ranks": ParallelLayout(legal), "micro_batch_size": None})
            for legal in numbers(text, r"--global-batch-size to ([\d or]+)\."):
                build_batch_plan(**{**request, "global_batch_size": legal, "micro_batch_size": None})
        else:
            for legal in numbers(text, r"Legal micro-batches: ([\d, .]+)\."):
                build_batch_plan(**{**request, "micro_batch_size": legal})


def numbers(text: str, pattern: str) -> list[int]:
    found = re.search(pattern, text)
    assert found, text
    return [int(number) for number in re.findall(r"\d+", found.group(1))]


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "said"),
    [
        (10, None, 4, "global_batch_size 10 cannot be divided over 4 ranks"),
        (10, None, 4, "Legal world sizes for it: 1, 2, 5, 10."),
        (10, None, 4, "--global-batch-size to 8 or 12."),
        (3, None, 4, "--global-batch-size to 4."),
        (12, 4, 2, "Legal micro-batches: 1, 2, 3, 6."),
        (12, 12, 2, "the 6 sequences that each of 2 ranks"),
        (0, None, 1, "at least 1 sequence, not 0"),
    ],
)
def test_errors_name_both_numbers_and_the_legal_ones(batch: int, micro: int | None, world_size: int, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_batch_plan(global_batch_size=batch, ranks=ParallelLayout(world_size), seq_len=8, micro_batch_size=micro)
    assert said in str(raised.value)


@given(st.integers(1, 5000))
def test_divisors_are_all_there_and_ascend(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_the_description_spells_the_multiplication_out() -> None:
    plan = build_batch_plan(global_batch_size=64, ranks=ParallelLayout(4), seq_len=128, micro_batch_size=8)
    assert plan.describe() == (
        "global batch 64 sequences = 8 micro-batch x 2 accumulation x 4 ranks = 8,192 tokens per step"
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
        (4, 8, "batch_ramp_from 4 cannot be divided over 8 ranks. Legal world sizes for it: 1, 2, 4."),
    ],
)
def test_a_ramp_that_ranks_cannot_follow_is_refused(first: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_batch_plan(global_batch_size=16, ranks=ParallelLayout(ranks), seq_len=8, ramp=BatchRamp(first, 100))
    assert words in str(raised.value)


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
