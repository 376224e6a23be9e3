from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from llmscale.data.mixture import MAX_PERIOD, MixRecipe, is_mix, read_recipe, whole_shares
from llmscale.errors import ConfigError

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
        ("sets: {a: 3}\nweights: {a: 1}", "sets.a"),
        ("sets: {7: a}\nweights: {7: 1}", "sets.7 = '7'"),
        ('sets: {"a\\nb": a}\nweights: {a: 1}', "must be letters"),
        (SETS + "stages: [{util: 1, weights: {web: 1}}]", "'stages.1.util'. Did you mean 'until'?"),
        (f"sets: {{a: {'x' * 5000}}}\nweights: {{a: 1}}", "sets.a"),
        ("sets: {a/b: c}\nweights: {a/b: 1}", "'a/b'"),
        (SETS, "stages"),
        (SETS + "weights: {web: 1, code: 1, math: 1}\nstages: []", "either"),
        (SETS + "weight: {web: 1}", "'weight'"),
        (SETS + "weights: {web: 1, code: 1, maths: 1}", "math"),
        (SETS + "weights: {web: 1, code: 1, math: -1}", "'-1'"),
        (SETS + "weights: {web: 1, code: 1, math: yes}", "True"),
        (SETS + "weights: {web: 1, code: 1, math: .nan}", "nan"),
        (SETS + "weights: {web: 1, code: 1, math: .inf}", "inf"),
        (SETS + "weights: {web: 1, code: 1}", "math"),
        (SETS + "weights: {web: 0, code: 0, math: 0}", "0"),
        (SETS + "stages: [{weights: {web: 1}}, {weights: {code: 1, math: 1}}]", "until"),
        (SETS + "stages: [{until: 1, weights: {web: 1}}, {weights: {code: 1, math: 1}}]", "until"),
        (SETS + "stages: [{until: soon, weights: {web: 1}}, {weights: {code: 1, math: 1}}]", "'soon'"),
        (
            SETS + "stages: [{until: .5, weights: {web: 1}}, {until: .4, weights: {code: 1}}, {weights: {math: 1}}]",
            "0.5",
        ),
        (SETS + "stages: [{until: 0.5, weights: {web: 1, code: 1, math: 1}}]", "last stage"),
        (SETS + "stages: [7]", "'7'"),
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
