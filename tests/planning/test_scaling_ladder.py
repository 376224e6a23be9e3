"""A ladder's plan, and its files, which may come from anybody."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError
from llmscale.planning.scaling import BESIROGLU, nearest_shape
from llmscale.planning.scaling_ladder import (
    Ladder,
    LadderRequest,
    add_rates,
    doubts,
    is_same_sweep,
    load_ladder,
    load_law,
    plan_ladder,
    plan_sweep,
    rate_at,
    save_ladder,
    save_law,
)
from llmscale.untrusted.terminal import make_visible_line

#: A law with resamples near Besiroglu's.
FITTED = replace(
    BESIROGLU,
    name="mine",
    covariance=None,
    resamples=tuple(
        map(tuple, np.random.default_rng(0).normal(BESIROGLU.coefficients, 0.01, (50, 5)).tolist())  # type: ignore[arg-type]
    ),
    loss_error=0.02,
)
LIKE = GPTShape(4, 4, 256, 50257, 1024, "gelu_tanh")


def make(**changes: object) -> Ladder:
    request = LadderRequest(**{"flops": 1e20, "like": LIKE, **changes})  # type: ignore[arg-type]
    return plan_ladder(request, "/data/mine", "gpt2")


def test_groups_have_equal_compute_and_the_whole_has_the_budget() -> None:
    runs = make().runs
    assert Counter(run.group for run in runs) == {0: 5, 1: 5, 2: 5, 3: 1}
    assert sum(run.flops for run in runs) == pytest.approx(1e20, rel=0.02)
    for group in range(3):
        flops = [run.flops for run in runs if run.group == group]
        assert max(flops) / min(flops) < 1.02
    held_out = runs[-1]
    assert held_out.is_held_out and held_out.flops == pytest.approx(4 * runs[-2].flops, rel=0.02)
    assert held_out.tokens / held_out.num_parameters == pytest.approx(20, rel=0.3)


def test_a_size_returns_in_the_next_group_with_four_times_the_tokens() -> None:
    first, second = ([run for run in make().runs if run.group == group] for group in (0, 1))
    shared = {run.num_parameters: run.tokens for run in first}
    again = [run for run in second if run.num_parameters in shared]
    assert len(again) == 4
    assert all(run.tokens / shared[run.num_parameters] == pytest.approx(4, rel=0.05) for run in again)


def test_rates_and_batches_follow_the_compute() -> None:
    runs = make().runs
    first, last = runs[0], runs[-1]
    assert first.lr == pytest.approx(0.3118 * first.flops**-0.125, rel=1e-3)
    assert last.lr < first.lr
    tokens = 0.2920 * last.flops**0.3271
    assert 0.7 < last.global_batch_size * 1024 / tokens < 1.5
    assert make(lr=1e-3).runs[0].lr == pytest.approx(1e-3, rel=0.01)
    assert make(rate_factor=50.0).runs[0].lr == pytest.approx(50 * first.lr, rel=1e-3)
    assert make(lr=1e-3).runs[-1].lr / 1e-3 == pytest.approx(last.lr / first.lr, rel=0.01)


def test_horizons_train_each_size_for_four_token_counts() -> None:
    runs = [run for run in make(design="horizons", sizes=4, has_held_out=False).runs]
    assert set(Counter(run.num_parameters for run in runs).values()) == {4}
    ratios = sorted(run.tokens / run.num_parameters for run in runs if run.n_embd == runs[0].n_embd)
    assert ratios[-1] / ratios[0] == pytest.approx(16, rel=0.1)


def test_a_budget_for_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"would have \d+ steps; at least 20 are needed"):
        make(flops=1e11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": 1e36}, "are more than the largest shape here has"),
        ({"flops": 1e33, "tokens_per_parameter": 1e6}, r"is too large: tokens = .* Give a smaller budget."),
    ],
)
def test_a_budget_that_no_run_can_use_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


@pytest.mark.parametrize("size", [2e4, 3e5, 5e6, 8e7])
def test_small_shapes_are_near_in_size(size: float) -> None:
    like = GPTShape(1, 1, 64, 257, 256, positions="rotary")
    assert nearest_shape(size, like).num_parameters == pytest.approx(size, rel=0.35)


def test_a_sweep_is_one_size_at_several_rates() -> None:
    request = LadderRequest(1e15, LIKE, tokens_per_parameter=10.0)
    sweep = plan_sweep(request, [], "/data/mine", "gpt2")
    first = sweep.runs[0]
    assert len({run.model_copy(update={"name": "", "lr": 1.0}) for run in sweep.runs}) == 1
    assert first.flops == pytest.approx(1e15, rel=0.05) and first.tokens / first.num_parameters == pytest.approx(
        10, rel=0.3
    )
    assert [run.lr for run in sweep.runs] == sorted(run.lr for run in sweep.runs)
    usual = 0.3118 * 1e15**-0.125
    assert sweep.runs[0].lr == pytest.approx(usual / 8, rel=0.01) and sweep.runs[-1].lr == pytest.approx(
        2 * usual, rel=0.01
    )
    middle = plan_sweep(replace(request, lr=1e-3), [], "/data/mine", "gpt2")
    assert 1e-3 in [run.lr for run in middle.runs]


def test_a_sweep_takes_further_rates_and_no_other_size() -> None:
    request = LadderRequest(1e15, LIKE)
    sweep = plan_sweep(request, [1e-3, 2e-3], "/data/mine", "gpt2")
    more = add_rates(sweep, [4e-3, 1e-3])
    assert [run.lr for run in more.runs] == [1e-3, 2e-3, 4e-3] and more.runs[:2] == sweep.runs
    assert is_same_sweep(more, sweep)
    assert not is_same_sweep(more, plan_sweep(replace(request, flops=2e15), [1e-3], "/data/mine", "gpt2"))
    assert not is_same_sweep(more, plan_sweep(request, [1e-3], "/data/other", "gpt2"))


def test_a_rate_falls_with_compute() -> None:
    assert rate_at(1e-3, 1e15, 1e15) == 1e-3
    # Four times the parameters at as many tokens for each are 16 times the compute: 4^-0.25.
    assert rate_at(1e-3, 1e15, 16e15) == pytest.approx(1e-3 / math.sqrt(2))


def test_run_files_hold_what_the_ladder_decides(tmp_path: Path) -> None:
    ladder = make()
    save_ladder(tmp_path / "new", ladder, {"positions": "rotary", "lr": 5.0, "save_every_minutes": 3})
    assert load_ladder(tmp_path / "new") == ladder
    run = ladder.runs[3]
    keys = yaml.safe_load((tmp_path / "new" / "configs" / f"{run.name}.yaml").read_text())
    assert keys["steps"] == run.steps and keys["lr"] == run.lr and keys["data"] == "/data/mine"
    assert (keys["positions"], keys["save_every_minutes"]) == ("rotary", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version = 2: must be 1"),
        ({"more": 1}, "more = 1: extra inputs are not permitted"),
        ({"runs": []}, r"runs = \[\]: list should have at least 1 item"),
        ({"name": "../../etc"}, r'runs.0.name = "../../etc": must be a plain name'),
        ({"steps": "12"}, 'runs.0.steps = "12": must be a valid integer'),
        ({"lr": 1e300}, "runs.0.lr = 1e[+]300: must be less than"),
        ({"name": "group0-twice"}, "two runs have the same name"),
    ],
)
def test_a_malformed_ladder_is_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save_ladder(tmp_path / "new", make(), {})
    path = tmp_path / "new" / "ladder.json"
    values = json.loads(path.read_text())
    top = change.keys() & {"version", "more", "runs"}
    if top:
        values |= change
    else:
        values["runs"][0] |= change
        values["runs"][1]["name"] = "group0-twice"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as caught:
        load_ladder(tmp_path / "new")
    assert "\n" not in str(caught.value) and str(caught.value).endswith("`llmscale ladder plan` writes it.")


def test_no_ladder_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ladder.json: No such file or directory. `llmscale ladder plan` writes it"):
        load_ladder(tmp_path)


def test_a_law_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    save_law(path, FITTED)
    law = load_law(path)
    assert law == replace(FITTED, resamples=law.resamples)
    assert np.array(law.resamples) == pytest.approx(np.array(FITTED.resamples), rel=1e-8)


@pytest.mark.parametrize("name", [".x", "a\nb\x1b[2J", "\udce4", "x" * 1000])
def test_a_law_of_any_folder_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "law.json"
    save_law(path, replace(FITTED, name=name))
    assert load_law(path).name == make_visible_line(name)[:255]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("coefficients", [1, 2, 3], "coefficients"),
        ("coefficients", [1.0, 2.0, 3.0, 0.0, 0.3], "coefficients.3 = 0.0: must be greater than or equal to 0.001"),
        ("coefficients", [700.0, -700.0, 0.0, 0.001, 0.001], "no finite optimum"),
        ("resamples", [list(BESIROGLU.coefficients)] * 49, "resamples"),
        ("resamples", [[700.0, -700.0, 0.0, 0.001, 0.001]] * 50, "no finite optimum"),
        (
            "resamples",
            [[0.0, 0.0, -700.0, 0.3, 0.3]] * 50,
            "resamples.0.2 = -700.0: must be greater than or equal to -7",
        ),
        ("loss_error", -1.0, "loss_error = -1.0: must be greater than or equal to 0"),
        ("name", "\u001b[2J", "must be one line"),
        ("version", 1, "version = 1: must be 2. `llmscale ladder fit` writes it"),
    ],
)
def test_a_malformed_law_is_one_line(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "law.json"
    save_law(path, FITTED)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=message):
        load_law(path)


def test_a_plan_of_too_few_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 different runs do not determine a law of five numbers: 8 do"):
        make(groups=2, sizes=3)
    assert len(make(groups=2, sizes=4).runs) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: 5.0}, "alpha is at its bound, 5"),
        ({3: 0.01}, "alpha is at its bound, 0.01"),
        ({2: math.log(1e-3)}, "E is at its bound, 0.001"),
    ],
)
def test_a_law_that_no_run_determines_is_refused(tmp_path: Path, change: dict[int, float], message: str) -> None:
    row = [change.get(index, value) for index, value in enumerate(FITTED.coefficients)]
    save_law(tmp_path / "law.json", replace(FITTED, coefficients=tuple(row)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"the runs do not determine this law: .*{message}"):
        load_law(tmp_path / "law.json")


def test_a_law_whose_optimum_is_known_within_ten_decades_is_refused(tmp_path: Path) -> None:
    rows = [[*FITTED.coefficients[:3], alpha, 0.3] for alpha in (0.02, 4.0)] * 25
    law = replace(FITTED, resamples=tuple(map(tuple, rows)))  # type: ignore[arg-type]
    assert doubts(law)[0].startswith("the best size for ")
    save_law(tmp_path / "law.json", law)
    with pytest.raises(ConfigError, match="the best size for"):
        load_law(tmp_path / "law.json")
    assert doubts(FITTED) == []
