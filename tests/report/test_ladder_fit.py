"""A ladder's fit from run folders, which may be damaged or a stranger's."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.cli.main import main
from llmscale.errors import ConfigError
from llmscale.planning.scaling import BESIROGLU, Interval
from llmscale.planning.scaling_ladder import Ladder, LadderRequest, LadderRun, plan_ladder, plan_sweep, save_ladder
from llmscale.report.ladder_fit import fit_ladder
from tests.report.runs import start, train, write_run

LIKE = GPTShape(4, 4, 256, 50257, 1024, "gelu_tanh")


def write_finished(folder: Path, run: LadderRun) -> None:
    """A run whose validations follow Besiroglu's law, 2 % above it before the end."""
    every = run.steps // 8
    records = [start()]
    for step in range(every, run.steps, every):
        loss = 1.02 * BESIROGLU.loss(run.num_parameters, run.tokens * step / run.steps)
        records.append({"kind": "validation", "step": step, "loss": loss})
    loss = BESIROGLU.loss(run.num_parameters, run.tokens)
    records.append(train(run.steps, tokens_seen=run.tokens))
    records.append({"kind": "validation", "step": run.steps, "loss": loss})
    records.append({"kind": "event", "event": "finished", "step": run.steps})
    write_run(folder / "runs" / run.name, records)


@pytest.fixture
def ladder(tmp_path: Path) -> Ladder:
    """A ladder in `tmp_path / "made"`; the held-out run is not trained."""
    ladder = plan_ladder(LadderRequest(1e20, LIKE), "/data/mine", "gpt2")
    save_ladder(tmp_path / "made", ladder, {})
    for run in ladder.runs[:-1]:
        write_finished(tmp_path / "made", run)
    return ladder


def test_a_ladder_gives_exponents_predictions_pictures_and_a_law(
    ladder: Ladder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "made"
    assert main(["ladder", "fit", str(folder), "--resamples", "50"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "15 runs: L = 1.8" in out and "approach 2, isoFLOP" in out and "Kaplan 2020" in out
    assert "In the middle of a longer schedule the loss is +2.0%" in out
    assert f"{ladder.runs[-1].name} is left out" in out and "not trained yet" in out
    assert all((folder / name).stat().st_size > 10_000 for name in ("isoflop.png", "loss.png"))
    fit = json.loads((folder / "fit.json").read_text())
    a = BESIROGLU.size_exponent
    assert fit["exponents"]["3, parametric"]["value"] == pytest.approx(a, abs=0.01)
    assert fit["exponents"]["2, isoFLOP"]["value"] == pytest.approx(a, abs=0.03)
    size = fit["next"]["num_parameters"]["value"]
    assert size == pytest.approx(BESIROGLU.optimal_parameters(fit["next"]["flops"]), rel=0.05)
    # plan
    assert main(["plan", "--law", str(folder / "law.json"), "--flops", "5.76e23", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["law"], plan["laws"][0]["name"]) == ("made", "made")
    assert plan["optimum"]["num_parameters"] == pytest.approx(BESIROGLU.optimal_parameters(5.76e23), rel=0.1)
    words = ["--flops", str(fit["next"]["flops"]), "--json"]
    assert main(["plan", "--law", str(folder / "law.json"), *words]) == 0
    planned, fitted = json.loads(capsys.readouterr().out)["laws"][0], fit["next"]
    for key in ("num_parameters", "tokens", "loss"):
        assert planned[key] == pytest.approx(fitted[key], rel=1e-5)
    assert main(["plan", "--law", str(folder / "law.json"), "--flops", "1e19"]) == 0
    assert re.search(r"\* +made ", capsys.readouterr().out)


def test_the_held_out_run_is_not_fitted_and_judged(ladder: Ladder, tmp_path: Path) -> None:
    before = fit_ladder(tmp_path / "made", ladder, 50)
    held_out = ladder.runs[-1]
    write_finished(tmp_path / "made", held_out)
    after = fit_ladder(tmp_path / "made", ladder, 50)
    assert after.parametric.law == before.parametric.law
    assert after.predictions[0].predicted == before.predictions[0].predicted
    assert before.predictions[0].is_inside is None and after.predictions[0].measured is not None
    loss = after.predictions[0].measured.loss
    lines = list(after.lines(tmp_path / "made"))
    assert f"measured {loss:.4f}, " in "\n".join(lines)
    # The law's vocabulary and context are not GPT-2's; the printed command plans with them.
    after.write(tmp_path / "made")
    assert main(shlex.split(lines[-1])[1:]) == 0
    # An interval without an end is null.
    assert after.isoflops is not None
    isoflops = replace(after.isoflops, exponent=Interval(0.5, -math.inf, math.inf))
    replace(after, isoflops=isoflops).write(tmp_path / "made")
    exponent = json.loads((tmp_path / "made" / "fit.json").read_text())["exponents"]["2, isoFLOP"]
    assert exponent == {"value": 0.5, "low": None, "high": None}


def write_loss(folder: Path, run: LadderRun, loss: float) -> None:
    """A finished run with a loss at its end."""
    end = {"kind": "validation", "step": run.steps, "loss": loss}
    finished = {"kind": "event", "event": "finished", "step": run.steps}
    write_run(folder / "runs" / run.name, [start(), train(run.steps, tokens_seen=run.tokens), end, finished])


def test_a_sweep_gives_the_rate_of_least_loss_and_those_of_larger_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    sweep = plan_sweep(LadderRequest(1e15, LIKE), [1e-3, 2e-3, 4e-3, 8e-3], "/data/mine", "gpt2")
    save_ladder(tmp_path / "made", sweep, {})
    for run in sweep.runs[:-1]:
        write_loss(tmp_path / "made", run, 3 + math.log(run.lr / 1.7e-3) ** 2)
    assert main(["ladder", "fit", str(tmp_path / "made")]) == 0
    fit = json.loads((tmp_path / "made" / "fit.json").read_text())
    assert fit["best_lr"] == pytest.approx(1.7e-3) and len(fit["losses"]) == 3
    size = sweep.runs[0].num_parameters
    assert fit["next"][0]["num_parameters"] == 4 * size and fit["next"][0]["lr"] == pytest.approx(1.7e-3 / math.sqrt(2))
    assert "lr-0.008 is left out: not started" in capsys.readouterr().out
    assert (tmp_path / "made" / "rates.png").stat().st_size > 10_000


@pytest.mark.parametrize(("losses", "beyond"), [((3.0, 3.1, 3.2), "0.0005"), ((3.2, 3.1, 3.0), "0.008")])
def test_a_least_loss_at_an_end_is_no_minimum(
    losses: tuple[float, ...], beyond: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = plan_sweep(LadderRequest(1e15, LIKE), [1e-3, 2e-3, 4e-3], "/data/mine", "gpt2")
    save_ladder(tmp_path / "made", sweep, {})
    for run, loss in zip(sweep.runs, losses, strict=True):
        write_loss(tmp_path / "made", run, loss)
    assert main(["ladder", "fit", str(tmp_path / "made")]) == 1
    assert f"--rates {beyond}\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "made" / "fit.json").read_text())["best_lr"] is None


def test_runs_that_are_damaged_or_have_no_believable_end_are_left_out(ladder: Ladder, tmp_path: Path) -> None:
    finished = {"kind": "event", "event": "finished"}
    without_end = [[], [{"loss": None}], [{"loss": 1e30}], [{"step": 5}]]
    for run, changes in zip(ladder.runs, without_end, strict=False):
        validations = [{"kind": "validation", "step": run.steps, "loss": 3.0, **change} for change in changes]
        end = {**finished, "step": run.steps}
        trained = train(run.steps, tokens_seen=run.tokens)
        write_run(tmp_path / "made" / "runs" / run.name, [start(), trained, *validations, end])
    for run, lines in zip(ladder.runs[4:], (["{\n"], [start(), train(10)]), strict=False):
        write_run(tmp_path / "made" / "runs" / run.name, lines)
    fit = fit_ladder(tmp_path / "made", ladder, 1)
    assert [run.name for run in fit.runs] == [run.name for run in ladder.runs[6:-1]]
    notes = dict(zip((run.name for run in ladder.runs), fit.notes, strict=False))
    for number, run in enumerate(ladder.runs[:6]):
        assert notes[run.name].startswith(f"{run.name} is left out")
        assert (f"no validation after {run.steps:,} steps" in notes[run.name]) == (number < 4)


def test_horizons_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder = plan_ladder(LadderRequest(1e20, LIKE, design="horizons", sizes=4), "/data/mine", "gpt2")
    save_ladder(tmp_path / "made", ladder, {})
    for run in ladder.runs:
        write_finished(tmp_path / "made", run)
    assert main(["ladder", "fit", str(tmp_path / "made"), "--resamples", "50"]) == 0
    assert "Approach 2 needs two groups of equal compute" in " ".join(capsys.readouterr().out.split())
    fit = json.loads((tmp_path / "made" / "fit.json").read_text())
    assert fit["exponents"].keys() == {"3, parametric"}
    assert fit["exponents"]["3, parametric"]["value"] == pytest.approx(BESIROGLU.size_exponent, abs=0.01)
    (prediction,) = fit["predictions"]
    assert prediction["predicted"]["value"] == pytest.approx(prediction["measured"], rel=1e-9)
    # The longest horizon, of 4 sizes, is missed by a law of the other 12 runs by nearly nothing.
    assert len(fit["misses_of_smaller_groups"]) == 4
    assert max(map(abs, fit["misses_of_smaller_groups"])) < 2e-3


def test_where_no_law_misses_a_group_the_fit_says_so(ladder: Ladder, tmp_path: Path) -> None:
    for run in ladder.runs[2:7]:
        shutil.rmtree(tmp_path / "made" / "runs" / run.name)
    text = " ".join(fit_ladder(tmp_path / "made", ladder, 1).lines(tmp_path / "made"))
    assert "too few runs to fit a law without it" in text and "misses the losses" not in text


def test_too_few_runs_name_the_command(ladder: Ladder, tmp_path: Path) -> None:
    save_ladder(tmp_path / "empty", ladder, {})
    with pytest.raises(ConfigError, match=r"0 finished runs are too few.*`llmscale ladder run .*empty` trains them"):
        fit_ladder(tmp_path / "empty", ladder, 50)


@pytest.mark.parametrize("seed", [12, pytest.param(38, marks=pytest.mark.slow)])
def test_losses_that_determine_no_law_say_so(
    ladder: Ladder, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = random.Random(seed)
    for run in ladder.runs[:-1]:
        records = [start(), train(run.steps, tokens_seen=run.tokens)]
        records.append({"kind": "validation", "step": run.steps, "loss": losses.uniform(1, 9)})
        records.append({"kind": "event", "event": "finished", "step": run.steps})
        write_run(tmp_path / "made" / "runs" / run.name, records)
    assert main(["ladder", "fit", str(tmp_path / "made"), "--resamples", "50"]) == 1
    assert "WARNING: these runs do not determine a law" in capsys.readouterr().out
