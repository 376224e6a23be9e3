from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmscale.data.mixture import (
    MAX_PERIOD,
    RECORDED_SETS,
    MixedOrder,
    MixedShards,
    MixRecipe,
    MixStage,
    PlacedStage,
    build_pattern,
    is_mix,
    keep_sets,
    open_kept_sets,
    open_recorded_sets,
    open_training_sets,
    place_stages,
    read_recipe,
    whole_shares,
)
from llmscale.data.order.sample_order import SampleOrder
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer, load_tokenizer
from llmscale.data.tokenizers.train_tokenizer import train_tokenizer
from llmscale.errors import ConfigError, DataError


@pytest.fixture
def mix(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "mix.yaml"
    folders = {"small": make_set(8), "large": make_set(24)}
    listed = "".join(f"  {name}: {folder}\n" for name, folder in folders.items())
    path.write_text(f"sets:\n{listed}weights: {{small: 3, large: 1}}\n")
    return path


def test_samples_count_through_all_sets(mix: Path) -> None:
    sets = open_training_sets(str(mix))
    shards = [TokenShards(location, "train") for location in sets.locations]
    both = MixedShards(sets.locations, "train")
    assert len(both) == sets.num_train_samples == len(shards[0]) + len(shards[1])
    ids = np.array([len(both) - 1, 0, len(shards[0]), len(shards[0]) - 1])
    expected = [shards[1].read(np.array([len(shards[1]) - 1]))[0], shards[0].read(np.array([0]))[0],
                shards[1].read(np.array([0]))[0], shards[0].read(np.array([len(shards[0]) - 1]))[0]]  # fmt: skip
    assert np.array_equal(both.read(ids), np.stack(expected))
    assert both.read(np.empty(0, np.int64)).shape == (0, sets.manifest.seq_len + 1)


def test_weights_are_no_part_of_what_samples_mean(mix: Path) -> None:
    before = open_training_sets(str(mix)).fingerprint
    mix.write_text(mix.read_text().replace("small: 3", "small: 1"))
    assert open_training_sets(str(mix)).fingerprint == before
    lines = mix.read_text().splitlines()
    mix.write_text("\n".join([lines[0], lines[2], lines[1], lines[3]]))
    assert open_training_sets(str(mix)).fingerprint != before, "sample ids count in the order of the sets"


def test_what_a_checkpoint_recorded_stands_in_for_a_file_that_is_gone(mix: Path) -> None:
    sets = open_training_sets(str(mix))
    assert sets.recipe is not None
    assert list(map(float, sets.recipe.parts)) == [0.75, 0.25]
    places = dict(zip(sets.names, sets.recipe.data, strict=True))
    identity = {RECORDED_SETS: {name: {"data": data, "samples": 7} for name, data in places.items()}}
    recorded = open_training_sets(str(mix), None, identity).recipe
    assert recorded is not None
    assert list(map(float, recorded.parts)) == [0.5, 0.5], "the run's own proportions"
    mix.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        open_training_sets(str(mix))
    assert open_training_sets(str(mix), None, identity).fingerprint == sets.fingerprint
    for damage in ({"data": "\0", "samples": 7}, {"data": places["small"], "samples": -1}, 5):
        with pytest.raises(ConfigError, match=r"sets\.small|must be numbers"):
            open_training_sets(str(mix), None, {RECORDED_SETS: {**identity[RECORDED_SETS], "small": damage}})


def test_a_single_set_is_as_without_a_mix(make_set: Callable[..., Path]) -> None:
    sets = open_training_sets(str(make_set(8)))
    assert sets.fingerprint == sets.manifest.fingerprint
    assert sets.recipe is None


def test_a_set_that_is_not_there_is_named(mix: Path, tmp_path: Path) -> None:
    text = mix.read_text()
    mix.write_text(text.replace(text.split("small: ")[1].split("\n")[0], str(tmp_path / "gone"), 1))
    with pytest.raises((DataError, ConfigError), match="gone"):
        open_training_sets(str(mix))


@pytest.mark.parametrize(
    "address", ["s3://theirs/set", "hf://datasets/their/set", "http://127.0.0.1:1/set", "file://s3://a"]
)
def test_no_address_is_asked_that_only_a_checkpoint_names(
    mix: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(url: str, **_: object) -> object:
        asked.append(url)
        raise DataError(f"no answer from {url}")

    monkeypatch.setattr("llmscale.data.shards.cache.Store", refuse)
    mix.write_text(f"sets:\n  theirs: {address}\n  b: b\nweights: {{theirs: 1, b: 1}}\n")
    for data in (address, str(mix)):
        for named in (None, "elsewhere", "s3://mine/set"):
            with pytest.raises(DataError, match=f"(?s){address}.*--data {data}"):
                open_recorded_sets(data, None, named, {})
    assert asked == []
    if not address.startswith("file:"):
        with pytest.raises(DataError, match="no answer"):
            open_recorded_sets(address, mix.parent, address, {})
        assert asked


def test_a_folder_that_a_checkpoint_names_is_read(make_set: Callable[..., Path]) -> None:
    folder = make_set(8)
    assert open_recorded_sets(str(folder), None, None, {}).fingerprint == open_training_sets(str(folder)).fingerprint


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "trained", "model"])
def test_a_run_keeps_the_tokenizer_of_a_set_that_is_gone(kind: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    name = "bytes"
    if kind == "tiktoken":
        ranks = [bytes([value]) for value in range(256)] + [b"th", b"the"]
        name = str(tmp_path / "mine.tiktoken")
        Path(name).write_text(
            "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
        )
    elif kind != "bytes":
        name = str(tmp_path / "tokenizer")
        train_tokenizer(open_source(str(text)), Path(name), 280)
    if kind == "model":
        (Path(name) / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(name)
    prepare(open_source(str(text)), tmp_path / "set", tokenizer, PrepareOptions(seq_len=16), num_workers=1)
    sets = open_training_sets(str(tmp_path / "set"))
    keep_sets(sets, tmp_path / "run")
    keep_sets(sets, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    for folder in (tmp_path / "set", tmp_path / "tokenizer"):
        shutil.rmtree(folder, ignore_errors=True)
    moved = open_kept_sets(tmp_path / "moved", sets.fingerprint, "set")
    assert moved is not None
    again = load_set_tokenizer(moved.first.folder, moved.manifest)
    assert again.encode("the quick fox") == tokenizer.encode("the quick fox")
    assert sorted(path.name for path in (tmp_path / "moved").rglob("chat_template.jinja")) == (
        ["chat_template.jinja"] if kind == "model" else []
    )
    assert open_kept_sets(tmp_path / "moved", "0" * 64, "set") is None
    assert open_kept_sets(tmp_path / "moved", "../../set", "set") is None
    (moved.first.folder / "manifest.json").write_text("{}")
    assert open_kept_sets(tmp_path / "moved", sets.fingerprint, "set") is None


def test_a_run_keeps_what_all_sets_of_a_mix_are(mix: Path, tmp_path: Path) -> None:
    sets = open_training_sets(str(mix))
    keep_sets(sets, tmp_path / "run")
    reopened = open_kept_sets(tmp_path / "run", sets.fingerprint, "mix")
    assert reopened is not None
    assert (reopened.names, reopened.num_train_samples) == (sets.names, sets.num_train_samples)


SETS = "sets: {web: a, code: b, math: s3://bucket/c}\n"


def read(tmp_path: Path, text: str) -> MixRecipe:
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return read_recipe(path)


def test_one_stage(tmp_path: Path) -> None:
    """GPT-3's table 2.2, whose percentages add up to 101."""
    recipe = read(tmp_path, SETS + "weights: {web: 0.60, code: 0.22, math: 0.19}\n")
    assert recipe.names == ("web", "code", "math")
    assert recipe.data == (str(tmp_path / "a"), str(tmp_path / "b"), "s3://bucket/c")
    (stage,) = recipe.stages
    assert stage.until == 1
    assert stage.shares == (60, 22, 19)


def test_weights_may_be_numbers_of_tokens(tmp_path: Path) -> None:
    (stage,) = read(tmp_path, SETS + "weights:\n  web: 1.5B\n  code: 500M\n  math: 1,000,000,000\n").stages
    assert stage.shares == (3, 1, 2)


@pytest.mark.parametrize("until", ["0.9", "0.9 of the run", "9e-1"])
def test_stages(tmp_path: Path, until: str) -> None:
    recipe = read(
        tmp_path, f"{SETS}stages:\n- until: {until}\n  weights: {{web: 2}}\n- weights: {{code: 1, math: 1}}\n"
    )
    assert [stage.until for stage in recipe.stages] == [Fraction(9, 10), 1]
    assert [stage.shares for stage in recipe.stages] == [(1, 0, 0), (0, 1, 1)]


def test_weights_that_need_a_long_period_are_rounded_and_none_is_lost() -> None:
    shares = whole_shares((Fraction(10_000_019), Fraction(1), Fraction(0), Fraction(3_000_017)))
    assert shares[1] == 1
    assert shares[2] == 0
    assert sum(shares) == MAX_PERIOD
    assert shares[0] / shares[3] == pytest.approx(10_000_019 / 3_000_017, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "sets"),
        ("sets: [a, b]\nweights: {a: 1}", "sets"),
        ("sets: {7: a}\nweights: {7: 1}", "sets.7 = 7"),
        ('sets: {"a\\nb": a}\nweights: {a: 1}', "must be letters"),
        (SETS + "stages: [{util: 1, weights: {web: 1}}]", "'stages.1.util'. Did you mean 'until'?"),
        (f"sets: {{a: {'x' * 5000}}}\nweights: {{a: 1}}", "sets.a"),
        ("sets: {a/b: c}\nweights: {a/b: 1}", "'a/b'"),
        (SETS, "stages"),
        (SETS + "weights: {web: 1, code: 1, math: 1}\nstages: []", "either"),
        (SETS + "weight: {web: 1}", "'weight'"),
        (SETS + "weights: {web: 1, code: 1, maths: 1}", "math"),
        (SETS + "weights: {web: 1, code: 1, math: -1}", "weights.math = -1"),
        (SETS + "weights: {web: 1, code: 1, math: .nan}", "nan"),
        (SETS + "weights: {web: 1, code: 1}", "math"),
        (SETS + "weights: {web: 0, code: 0, math: 0}", "0"),
        (SETS + "stages: [{weights: {web: 1}}, {weights: {code: 1, math: 1}}]", "until"),
        (SETS + "stages: [{until: soon, weights: {web: 1}}, {weights: {code: 1, math: 1}}]", "'soon'"),
        (
            SETS + "stages: [{until: .5, weights: {web: 1}}, {until: .4, weights: {code: 1}}, {weights: {math: 1}}]",
            "0.5",
        ),
        (SETS + "stages: [{until: 0.5, weights: {web: 1, code: 1, math: 1}}]", "last stage"),
        ('sets: {web: "a\\ud800b"}\nweights: {web: 1}', "half of a surrogate pair"),
        (SETS + "stages: [{until: 0.5, weights: 3}, {weights: {web: 1}}]", "weights"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert named in str(caught.value)
    assert str(tmp_path / "mix.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mix\.yaml"):
        read_recipe(tmp_path / "mix.yaml")


def test_a_folder_or_a_url_is_a_set(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").mkdir()
    assert not is_mix(str(tmp_path / "set.yaml"))
    assert not is_mix("s3://bucket/mix.yaml")
    assert not is_mix("data/web")
    assert is_mix("data/mix.yml")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(sum))
def test_every_set_is_within_one_sample_of_its_share_at_every_position(shares: list[int]) -> None:
    pattern = build_pattern(tuple(shares))
    period = sum(shares)
    counts = np.cumsum(np.eye(len(shares), dtype=int)[pattern.owners], axis=0)
    due = np.arange(1, period + 1)[:, None] * np.array(shares) / period
    assert np.abs(counts - due).max() < 1
    assert counts[-1].tolist() == shares


@pytest.mark.parametrize("shares", [(60, 22, 8, 8, 3), (1,), (0, 5, 1), (1000, 1)])
def test_any_position_on_its_own_is_as_in_one_walk(shares: tuple[int, ...]) -> None:
    pattern = build_pattern(shares)
    offsets = np.arange(3 * sum(shares) + 2)
    owners, before = pattern.owners_at(offsets)
    seen = np.zeros(len(shares), int)
    for offset, owner, count in zip(offsets.tolist(), owners.tolist(), before.tolist(), strict=True):
        assert seen[owner] == count
        assert pattern.counts_before(offset).tolist() == seen.tolist()
        seen[owner] += 1


SIZES = (50, 700, 23)
STAGES = (PlacedStage(0, (5, 3, 2)), PlacedStage(400, (1, 1, 7)))


@pytest.fixture
def order() -> MixedOrder:
    return MixedOrder([SampleOrder([size], seed=3) for size in SIZES], STAGES)


def test_each_set_is_read_in_its_own_order_through_all_stages(order: MixedOrder) -> None:
    """Every sample of a set once per epoch of the set."""
    ids = order.sample_ids(np.arange(2000))
    owners = order.set_of(ids)
    assert owners.min() == 0
    for number, (own, first) in enumerate(zip(order.orders, order.first_ids, strict=True)):
        mine = ids[owners == number] - first
        assert mine.tolist() == own.sample_ids(np.arange(len(mine))).tolist()


def test_positions_may_be_asked_for_in_any_order_and_number(order: MixedOrder) -> None:
    everything = order.sample_ids(np.arange(1000))
    mixed_up = np.random.default_rng(0).permutation(1000)
    assert order.sample_ids(mixed_up).tolist() == everything[mixed_up].tolist()
    assert [int(order.sample_ids(np.array([position]))[0]) for position in (0, 399, 400, 999)] == [
        everything[position] for position in (0, 399, 400, 999)
    ]
    assert order.sample_ids(np.empty(0, np.int64)).tolist() == []


def test_proportions_change_where_a_stage_begins(order: MixedOrder) -> None:
    owners = order.set_of(order.sample_ids(np.arange(400 + 900)))
    assert np.bincount(owners[:400]).tolist() == [200, 120, 80]
    assert np.bincount(owners[400:]).tolist() == [100, 100, 700]
    assert order.drawn_before(1300).tolist() == [300, 220, 780]
    assert order.drawn_before(0).tolist() == [0, 0, 0]


def recipe(*stages: tuple[str, tuple[int, ...]]) -> MixRecipe:
    listed = tuple(MixStage(Fraction(until), shares) for until, shares in stages)
    return MixRecipe(Path("mix.yaml"), ("a", "b"), ("a", "b"), listed)


ANNEALED = recipe(("0.9", (7, 3)), ("1", (1, 9)))


def test_stages_are_cut_between_steps() -> None:
    assert place_stages(ANNEALED, 8 * 101, 8) == (PlacedStage(0, (7, 3)), PlacedStage(8 * 91, (1, 9)))


def test_a_run_that_goes_on_has_the_same_stages() -> None:
    first = place_stages(ANNEALED, 8000, 8)
    for seen in (8, 4000, 7200, 7208, 8000):
        assert place_stages(ANNEALED, 8000, 8, saved=first, seen=seen) == first


def test_what_was_seen_stays_and_what_is_to_come_is_as_the_file_says_now() -> None:
    first = place_stages(ANNEALED, 8000, 8)
    assert place_stages(ANNEALED, 16000, 8, saved=first, seen=4000)[1].begin == 14400, "a longer run"
    back = place_stages(ANNEALED, 16000, 8, saved=first, seen=7600)
    assert [stage.begin for stage in back] == [0, 7200, 7600, 14400], "the second stage had begun, and ends here"
    assert [stage.shares for stage in back] == [(7, 3), (1, 9), (7, 3), (1, 9)]
    other = place_stages(recipe(("1", (1, 1))), 8000, 8, saved=first, seen=4000)
    assert other == (PlacedStage(0, (7, 3)), PlacedStage(4000, (1, 1)))
    sooner = place_stages(recipe(("0.25", (7, 3)), ("1", (1, 9))), 8000, 8, saved=first, seen=4000)
    assert sooner == (PlacedStage(0, (7, 3)), PlacedStage(4000, (1, 9)))


def test_a_run_that_becomes_a_mix_is_one_from_its_beginning() -> None:
    assert [stage.begin for stage in place_stages(ANNEALED, 8000, 8, seen=800)] == [0, 7200]


def test_neighbours_of_equal_shares_are_one_stage_wherever_the_run_is_resumed() -> None:
    same = recipe(("0.5", (7, 3)), ("1", (7, 3)))
    first = place_stages(same, 816, 8)
    assert first == (PlacedStage(0, (7, 3)),)
    assert place_stages(same, 816, 8, saved=first, seen=408) == first


def test_a_stage_that_rounds_to_nothing_is_left_out() -> None:
    assert place_stages(recipe(("0.01", (1, 0)), ("1", (0, 1))), 80, 8) == (PlacedStage(0, (0, 1)),)


def test_stages_lie_behind_what_is_left_out() -> None:
    stages = place_stages(ANNEALED, 8000, 8, skipped=((800, 880), (7240, 7280)))
    assert [stage.begin for stage in stages] == [0, 7200 + 80 + 40]
