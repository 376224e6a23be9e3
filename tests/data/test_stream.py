"""A stream is a function of seed and step: for any number of ranks, with any reader, after any end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from llmscale import api
from llmscale.data.stream import Stream
from llmscale.errors import ConfigError, DataError


def open_for(data: Path, rank: int = 0, ranks: int = 1, *, total_steps: int | None = 6, **more: int) -> Stream:
    sizes = {"global_batch": 12, "micro_batch": 2, "seed": 3} | more
    return api.open_stream(data, **sizes, total_steps=total_steps, rank=rank, world_size=ranks)


def ids_of_step(data: Path, ranks: int, step: int) -> list[int]:
    streams = [open_for(data, rank, ranks) for rank in range(ranks)]
    return sorted(int(sample) for stream in streams for batch in stream.at(step) for sample in batch.sample_ids)


def test_a_step_has_the_same_samples_on_any_number_of_ranks(tiny_set: Path) -> None:
    for step in (0, 5):
        alone = ids_of_step(tiny_set, 1, step)
        assert len(set(alone)) == 12
        for ranks in (2, 3, 4, 5, 7):
            assert ids_of_step(tiny_set, ranks, step) == alone


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 7])
def test_the_mean_of_weighted_losses_is_that_of_the_batch(tiny_set: Path, ranks: int) -> None:
    batches = [batch for rank in range(ranks) for batch in open_for(tiny_set, rank, ranks).at(1)]
    assert sum(batch.weight for batch in batches) / len(batches) == pytest.approx(1.0)
    assert all((batch.weight == 0) == (not len(batch.sample_ids)) for batch in batches)


def test_every_reader_gives_the_same_micro_batches_and_a_step_is_enough_to_go_on(tiny_set: Path) -> None:
    expected = [batch.tokens for step in range(6) for batch in open_for(tiny_set).at(step)]
    by_steps = [batch.tokens for batches in open_for(tiny_set).steps() for batch in batches]
    iterated = [batch.tokens for batch in open_for(tiny_set)]
    for workers in (0, 2):
        loaded = [batch.tokens for batch in DataLoader(open_for(tiny_set), batch_size=None, num_workers=workers)]
        assert len(loaded) == len(expected) and all(map(torch.equal, loaded, expected))
    assert all(map(torch.equal, by_steps, expected)) and all(map(torch.equal, iterated, expected))
    later = open_for(tiny_set)
    later.load_state_dict(open_for(tiny_set).state_at(4))
    assert len(later) == 12
    assert all(map(torch.equal, [batch.tokens for batch in later], expected[24:]))
    ahead = [batch.tokens for batches in open_for(tiny_set).steps(4, num_workers=1) for batch in batches]
    assert all(map(torch.equal, ahead, expected[24:]))


def test_a_stream_without_end_goes_on(tiny_set: Path) -> None:
    stream = open_for(tiny_set, total_steps=None)
    assert len(list(itertools.islice(stream.steps(10_000), 3))) == 3
    assert stream.step == 10_003
    with pytest.raises(TypeError):
        len(stream)


def test_a_state_of_another_stream_is_refused(tiny_set: Path, digits: Path) -> None:
    state = open_for(tiny_set).state_at(2)
    for other in (open_for(digits), open_for(tiny_set, seed=4), open_for(tiny_set, global_batch=24)):
        with pytest.raises(DataError, match="the state is of another stream: "):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="its step is '-1'"):
        open_for(tiny_set).load_state_dict({**state, "step": -1})


def test_skipped_steps_are_left_out_for_good(tiny_set: Path) -> None:
    def open_without(*skips: tuple[int, int]) -> Stream:
        return api.open_stream(tiny_set, global_batch=12, micro_batch=2, seed=3, total_steps=9, skip_steps=skips)

    def ids(stream: Stream, step: int) -> list[int]:
        return [int(sample) for batch in stream.at(step) for sample in batch.sample_ids]

    plain, skipping = open_without(), open_without((2, 4), (3, 4))
    remaining = [0, 1, 4, 6, 7, 8]
    assert [ids(skipping, step) for step in range(6)] == [ids(plain, step) for step in remaining]
    state = plain.state_at(2)
    skipping.load_state_dict(state)
    assert skipping.step == 2
    for wrong in (open_without((1, 2)), open_without()):
        with pytest.raises(DataError, match="Steps that are done cannot be skipped"):
            wrong.load_state_dict(skipping.state_at(3) if wrong.skipped == [] else state)
    with pytest.raises(ConfigError, match=r"skip_steps = \(3, 3\)"):
        open_without((3, 3))


def test_sizes_that_do_not_fit_are_refused(tiny_set: Path) -> None:
    with pytest.raises(ConfigError, match=r"global_batch 12 is not a number of micro-batches of 5"):
        open_for(tiny_set, micro_batch=5)
    with pytest.raises(ConfigError, match="less than one sample for each of 13 ranks"):
        open_for(tiny_set, ranks=13)
    with pytest.raises(IndexError):
        open_for(tiny_set).at(6)


def test_stages_of_a_mixture_are_parts_of_the_run(tiny_set: Path, digits: Path, tmp_path: Path) -> None:
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        f"sets:\n  words: {tiny_set}\n  digits: {digits}\n"
        "stages:\n- until: 0.5\n  weights: {words: 1}\n- weights: {digits: 1}\n"
    )
    with pytest.raises(ConfigError, match="give total_steps"):
        open_for(mix, total_steps=None)
    stream = open_for(mix)
    assert stream.identity["stages"] == [[0, [1, 0]], [36, [0, 1]]]
    assert all(48 <= int(token) <= 57 or token == 32 for batch in stream.at(5) for token in batch.tokens[0, :8])


def test_a_sampler_deals_any_dataset_in_the_same_way() -> None:
    def ids(ranks: int, step: int) -> list[int]:
        samplers = (
            api.batch_sampler(100, global_batch=12, micro_batch=2, seed=3, rank=rank, world_size=ranks)
            for rank in range(ranks)
        )
        return sorted(
            index
            for sampler in samplers
            for batch, weight in zip(sampler.at(step), sampler.weights, strict=True)
            for index in batch
            if weight
        )

    alone = [ids(1, step) for step in range(25)]
    assert sorted(itertools.chain.from_iterable(alone)) == sorted([*range(100)] * 3), "three epochs"
    for ranks in (2, 5):
        assert [ids(ranks, step) for step in range(25)] == alone


def test_a_sampler_serves_a_loader_and_continues_at_a_step() -> None:
    def sampler() -> api.BatchSampler:
        return api.batch_sampler(50, global_batch=6, micro_batch=3, seed=1, total_steps=9)

    data = [torch.tensor(number) for number in range(50)]
    batches = [batch.tolist() for batch in DataLoader(data, batch_sampler=sampler())]
    assert len(batches) == len(sampler()) == 18
    later = sampler()
    later.load_state_dict(sampler().state_at(7))
    assert [batch.tolist() for batch in DataLoader(data, batch_sampler=later, num_workers=0)] == batches[14:]
    with pytest.raises(DataError, match="another stream: global_batch was 6 and is 8"):
        api.batch_sampler(50, global_batch=8, seed=1).load_state_dict(sampler().state_at(1))
