"""The throughput model beside runs that it was not fitted to: tests.planning.published_runs has the rule."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from llmscale.cli.plan_answers import _MEASURED_BEYOND
from llmscale.planning.step_time import GPUS_WITH_RUNS
from tests.planning.published_runs import PublishedRun, published_runs

RUNS = published_runs()


@pytest.fixture(scope="module")
def error_of(step_of) -> dict[str, float]:
    """Run -> estimated over published rate, minus 1."""
    return {run.row["run"]: 1 / run.over_estimate(step_of) - 1 for run in RUNS if run.is_expressible}


def errors(runs: Iterable[PublishedRun], error_of: dict[str, float]) -> np.ndarray:
    return np.array([error_of[run.row["run"]] for run in runs])


def is_zero_3_of_2021(run: PublishedRun) -> bool:
    """Narayanan et al.'s table 2."""
    return "without model parallelism" in run.row["source"]


def test_error_on_runs_that_count_is_as_documented(error_of: dict[str, float]) -> None:
    of_runs = errors([run for run in RUNS if run.counts], error_of)
    assert len(of_runs) == 51
    assert np.median(abs(of_runs)) < 0.085
    assert np.quantile(abs(of_runs), 0.9) < 0.21
    # It is rather too fast than too slow.
    assert 0.03 < np.median(of_runs) < 0.07


#: Words of the nine sources' names.
TEAMS = (
    "FlashAttention-2 (Dao",
    "LambdaLabsML",
    "fms-fsdp",
    "torchtitan",
    "OLMo-core",
    "KempnerForge",
    "TinyLlama",
    "Hugging Face",
    "llm.c",
)


def test_how_much_the_median_rests_on_one_source(error_of: dict[str, float]) -> None:
    """IBM's sixteen runs are a third of those that count, and among the nearest: without them, and with one vote for
    every source, it is more than 10 %."""
    of_team = {team: [run for run in RUNS if run.counts and team in run.row["source"]] for team in TEAMS}
    assert sum(map(len, of_team.values())) == 51
    medians = [np.median(abs(errors(runs, error_of))) for runs in of_team.values()]
    assert np.median(medians) == pytest.approx(0.13, abs=0.01)
    for team in TEAMS:
        others = [run for name, runs in of_team.items() if name != team for run in runs]
        median = np.median(abs(errors(others, error_of)))
        assert median == pytest.approx(0.122, abs=0.005) if team == "fms-fsdp" else median < 0.1, team


def test_gpus_that_count_as_checked_are_those_of_the_runs() -> None:
    fitted = (Path(__file__).parent / "llm_foundry_rows.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in fitted if not line.startswith("#"))
    of_runs = {run.row["gpu"] for run in RUNS if run.counts}
    assert of_runs | {row["gpu"] for row in rows} == {*GPUS_WITH_RUNS}


def test_with_the_six_worst_that_do_not_count_for_their_attention_it_is_still_within_10_percent(
    error_of: dict[str, float],
) -> None:
    with_2021 = [run for run in RUNS if run.counts or is_zero_3_of_2021(run)]
    assert len(with_2021) == 57
    assert np.median(abs(errors(with_2021, error_of))) < 0.1


def test_zero_3_of_2021_was_slower_by_as_much_as_is_said(error_of: dict[str, float]) -> None:
    """Not a success of the model: how far its extrapolation is from six runs at 175B and 530B parameters."""
    ratios = errors([run for run in RUNS if is_zero_3_of_2021(run)], error_of) + 1
    assert (min(ratios), max(ratios)) == (pytest.approx(1.5, abs=0.05), pytest.approx(2.8, abs=0.1))


def test_plan_cites_the_error_on_opt_175b(error_of: dict[str, float]) -> None:
    (run,) = [run for run in RUNS if run.row["run"].startswith("OPT-175B")]
    assert f"{1 + error_of[run.row['run']]:.2f} times as fast" in _MEASURED_BEYOND
    mfu = run.tokens_per_second_per_gpu * run.shape.flops_per_token / 312e12
    assert f"{run.row['rate']} TFLOP/s" in _MEASURED_BEYOND and f"{100 * mfu:.0f} % MFU" in _MEASURED_BEYOND


def test_every_run_has_a_source_and_what_does_not_count_a_reason() -> None:
    assert len({run.row["run"] for run in RUNS}) == len(RUNS) == 88
    for run in RUNS:
        assert run.row["source"]
        assert run.counts or run.row["counts"].startswith("no: ")
