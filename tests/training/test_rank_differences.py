from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from llmscale.errors import ConfigError, DataError, LlmscaleError
from llmscale.training.rank_differences import Section, contribute, describe_ranks, explain, find_speakers

ALIKE = {
    "configuration": {"lr": "0.0003", "steps": "100", **{f"key_{number}": "x" for number in range(60)}},
    "data set": {"vocab_size": "256", "train/shard.00000.mds": "a" * 32 + " (50 samples)"},
    "sources": {f"module_{number}.py": "b" * 64 for number in range(200)},
}


def changed(section: str, **values: str) -> dict[str, Section]:
    return {**ALIKE, section: {**ALIKE[section], **values}}


def compare(ranks: Sequence[Mapping[str, Section]], ranks_per_host: int = 8) -> LlmscaleError | None:
    """What the ranks would all raise; only those that must say more than their digests do."""
    contributions = [
        replace(contribute(sections), host=f"node-{rank // ranks_per_host}") for rank, sections in enumerate(ranks)
    ]
    speakers = find_speakers(contributions)
    if not speakers:
        return None
    details = [
        {name: sections[name] for name, speaking in speakers.items() if rank in speaking}
        for rank, sections in enumerate(ranks)
    ]
    assert sum(map(bool, details)) <= len(set().union(*speakers.values()))
    return explain(contributions, details)


def test_ranks_that_are_alike_have_nothing_to_say() -> None:
    assert compare([ALIKE] * 64) is None


def test_an_error_names_what_differs_the_values_the_ranks_and_the_host() -> None:
    error = compare([ALIKE] * 4 + [changed("configuration", lr="0.0006")], ranks_per_host=2)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "the ranks were not started alike, so they cannot train together. "
        "configuration: lr is 0.0003 on ranks 0-3, 0.0006 on rank 4 (host node-2). Start every rank with"
    )


def test_on_one_host_the_host_is_not_named_and_the_smaller_group_comes_second() -> None:
    error = compare([changed("configuration", steps="200"), ALIKE, ALIKE])
    assert "steps is 100 on ranks 1-2, 200 on rank 0. Start" in str(error)


def test_only_data_is_a_data_error_and_hashes_are_short() -> None:
    other = changed("data set", **{"train/shard.00000.mds": "c" * 32 + " (50 samples)"})
    error = compare([ALIKE, other])
    assert isinstance(error, DataError)
    assert "data set: train/shard.00000.mds is aaaa" in str(error)
    both = {**other, "sources": {**ALIKE["sources"], "module_7.py": "d" * 64}}
    error = compare([ALIKE, both])
    assert isinstance(error, ConfigError)
    assert "module_7.py is bbbbbbbbbbbb on rank 0, dddddddddddd on rank 1" in str(error)


def test_what_only_some_have_is_absent_on_the_others() -> None:
    shorter = {**ALIKE, "sources": {name: value for name, value in ALIKE["sources"].items() if name != "module_3.py"}}
    assert "module_3.py is bbbbbbbbbbbb on ranks 0-1, absent on rank 2" in str(compare([ALIKE, ALIKE, shorter]))
    assert "module_3.py is absent on ranks 0-1, bbbbbbbbbbbb on rank 2" in str(compare([shorter, shorter, ALIKE]))


@pytest.mark.parametrize("world_size", [64, 1000])
def test_a_thousand_ranks_stay_short_and_quick(world_size: int) -> None:
    other = changed("configuration", lr="0.1", steps="7")
    every_third = [other if rank % 3 == 0 else ALIKE for rank in range(world_size)]
    every_third[-2] = changed("sources", module_0="x" * 64)
    every_third[5] = changed("configuration", **{f"key_{number}": "y" * 500 for number in range(60)})
    began = time.process_time()
    error = compare(every_third)
    assert time.process_time() - began < 10, "seconds would be minutes at 10,000 ranks"
    assert len(str(error)) < 2000
    assert len(pickle.dumps(contribute(ALIKE))) < 1000, "what every rank sends when all is well"


def test_every_rank_its_own_value() -> None:
    error = compare([changed("configuration", lr=str(rank)) for rank in range(64)])
    assert "lr is 0 on rank 0, 1 on rank 1 (host node-0), 2 on rank 2 (host node-0) and 61 other values" in str(error)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
        (list(range(0, 1000, 2)), "ranks 0, 2, 4, 6 and 496 more"),
    ],
)
def test_ranks_in_a_few_words(ranks: list[int], words: str) -> None:
    assert describe_ranks(ranks) == words
