"""Read the runs of a scaling ladder, fit laws to them, report the fits and draw them. No torch.

Run folders are not trusted: a run whose record is damaged, unfinished or of another length is left out, with a note.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmscale.config.user_paths import write_output_file
from llmscale.errors import ConfigError
from llmscale.planning.law_fit import (
    FittedRun,
    Floats,
    IsoflopFit,
    ParametricFit,
    best_rate,
    fit_isoflops,
    fit_parametric,
    longer_schedules,
    schedule_exponents,
)
from llmscale.planning.scaling import BESIROGLU, Interval, ParametricLaw
from llmscale.planning.scaling_ladder import (
    HELD_OUT_RATIO,
    LAW_NAME,
    RUNS_NAME,
    Ladder,
    LadderRun,
    doubts,
    rate_at,
    save_law,
)
from llmscale.report.history import load_history
from llmscale.report.run_list import read_run
from llmscale.report.save_figure import import_pyplot, save_figure
from llmscale.terminal.human_numbers import count_nouns, format_quantity
from llmscale.terminal.table import Column, output_width, table_lines
from llmscale.training.run_folder import without_nan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIT_NAME = "fit.json"
ISOFLOP_NAME = "isoflop.png"
LOSS_NAME = "loss.png"
RATES_NAME = "rates.png"
#: All that a fit writes.
OUTPUTS = (LAW_NAME, FIT_NAME, ISOFLOP_NAME, LOSS_NAME, RATES_NAME)
_BLUE = "#0072b2"
_ORANGE = "#d55e00"
_GREY = "0.55"
_POINTS = 60
#: Sizes for which a sweep gives a rate, over its own.
NEXT_SIZES = (4, 16, 64)
#: Largest loss that is believed, in nats per token.
_MOST_LOSS = 100.0
#: Published exponents a of N* ~ C^a.
PUBLISHED_EXPONENTS = {
    "Kaplan 2020, arXiv:2001.08361, table 6": 0.73,
    "Hoffmann 2022, arXiv:2203.15556, approach 1": 0.50,
    "Hoffmann 2022, approach 2": 0.49,
    "Hoffmann 2022, approach 3": 0.46,
    "Besiroglu 2024, arXiv:2404.10102, approach 3": round(BESIROGLU.size_exponent, 3),
    "DeepSeek-AI 2024, arXiv:2401.02954, approach 2": 0.524,
    "Llama 3, Grattafiori 2024, arXiv:2407.21783, approach 2": 0.463,
}


class Prediction(NamedTuple):
    """A held-out run with its loss predicted from the other runs."""

    planned: LadderRun
    predicted: Interval
    measured: FittedRun | None
    """None before the run has ended."""

    @property
    def is_inside(self) -> bool | None:
        """True if the measured loss is within the interval; None before the run has ended."""
        if self.measured is None:
            return None
        return self.predicted.low <= self.measured.loss <= self.predicted.high


@dataclass(frozen=True)
class LadderFit:
    """Everything that a ladder's finished runs say."""

    ladder: Ladder
    runs: list[FittedRun]
    parametric: ParametricFit
    isoflops: IsoflopFit | None
    longer: dict[str, float]
    """Loss in the middle of a longer schedule, by the name of the run that ended there."""
    exponents_by_schedule: tuple[float, float] | None
    """Exponents with each run's own schedule, and with one long schedule per size."""
    predictions: list[Prediction]
    notes: list[str]

    @cached_property
    def doubts(self) -> list[str]:
        """Reasons why the runs do not determine a law."""
        return doubts(self.parametric.law)

    @property
    def is_determined(self) -> bool:
        return not self.doubts

    @property
    def next_flops(self) -> float:
        """Compute of the next group."""
        return HELD_OUT_RATIO * max(run.flops for run in self.runs)

    def exponents(self) -> dict[str, Interval]:
        """Return the exponent a of N* ~ C^a by approach."""
        of_isoflops = {"2, isoFLOP": self.isoflops.exponent} if self.isoflops else {}
        return {**of_isoflops, "3, parametric": self.parametric.interval(lambda law: law.size_exponent)}

    def next_optimum(self) -> dict[str, Interval]:
        """Return the optimal size, its tokens and its loss for the next group's compute, by approach 3."""
        flops = self.next_flops
        fit = self.parametric
        return {
            "num_parameters": fit.interval(lambda law: law.optimal_parameters(flops)),
            "tokens": fit.interval(lambda law: law.optimal_tokens(flops)),
            "loss": fit.predict(lambda law: law.optimal_loss(flops)),
        }

    def write(self, folder: Path) -> None:
        """Write law.json, for `plan --law`, and fit.json. Raises ConfigError."""
        save_law(folder / LAW_NAME, self.parametric.law)
        ends = ("name", "num_parameters", "tokens", "loss")
        values = {
            "runs": [{key: getattr(run, key) for key in ends} for run in self.runs],
            "exponents": {name: asdict(value) for name, value in self.exponents().items()},
            "published_exponents": PUBLISHED_EXPONENTS,
            "next": {"flops": self.next_flops, **{key: asdict(value) for key, value in self.next_optimum().items()}},
            "predictions": [
                {
                    "run": item.planned.name,
                    "predicted": asdict(item.predicted),
                    "is_inside": item.is_inside,
                    "measured": item.measured and item.measured.loss,
                }
                for item in self.predictions
            ],
            "misses_of_smaller_groups": self.parametric.misses,
            "losses_in_longer_schedules": self.longer,
            "exponents_by_schedule": self.exponents_by_schedule,
            "notes": self.notes,
        }
        write_output_file("fit", folder / FIT_NAME, json.dumps(without_nan(values), allow_nan=False, indent=1) + "\n")

    def lines(self, folder: Path) -> Iterator[str]:
        """Yield the report."""
        if self.doubts:
            yield (
                f"WARNING: these runs do not determine a law: {'; '.join(self.doubts)}. `llmscale plan` refuses it, "
                "and no number of approach 3 below is of use. Look for runs that failed with `llmscale report "
                f"{folder / RUNS_NAME}`, or train more, of more sizes or with more compute."
            )
        yield from self.notes
        ln_a, ln_b, ln_e, alpha, beta = self.parametric.law.coefficients
        yield (
            f"{count_nouns(len(self.runs), 'run')}: L = {math.exp(ln_e):.3f} + {math.exp(ln_a):.4g} / N^{alpha:.3f} + "
            f"{math.exp(ln_b):.4g} / D^{beta:.3f} nats per token; errors of {self.parametric.residuals.std():.2%}"
        )
        yield ""
        columns = (Column("N* ~ C^a by", is_text=True), Column("a"), Column("80 %", is_text=True))
        rows = [
            [f"approach {name}", f"{a.value:.3f}", f"{a.low:.3f}-{a.high:.3f}"] for name, a in self.exponents().items()
        ]
        rows += [[name, f"{a:.3f}", ""] for name, a in PUBLISHED_EXPONENTS.items()]
        yield from table_lines(columns, rows, output_width())
        if not self.isoflops:
            yield "Approach 2 needs two groups of equal compute with four sizes, and the lowest loss within these."
        yield ""
        yield from self._schedule_lines()
        if misses := self.parametric.misses:
            yield (
                f"Fitted without its largest group, the law misses the losses there by {min(misses):+.1%} to "
                f"{max(misses):+.1%}. Intervals of losses below contain an error of that size."
            )
        else:
            yield (
                "Below the largest group there are too few runs to fit a law without it. Intervals of losses below "
                "contain the scatter of the runs, but not that the law may bend."
            )
        for item in self.predictions:
            run = item.planned
            verdict = "inside" if item.is_inside else "OUTSIDE"
            if item.measured:
                measured = f"measured {item.measured.loss:.4f}, {verdict}"
            else:
                measured = "not trained yet"
            yield (
                f"{run.name}: {format_quantity(run.num_parameters)} parameters on {format_quantity(run.tokens)} "
                f"tokens, predicted {_range(item.predicted)}; {measured}"
            )
        if self.doubts:
            return
        best = self.next_optimum()
        sizes = (best["num_parameters"], best["tokens"])
        size, tokens = (
            f"{format_quantity(v.value)} ({format_quantity(v.low)}-{format_quantity(v.high)})" for v in sizes
        )
        yield f"next, {self.next_flops:.3g} FLOPs: {size} parameters on {tokens} tokens, loss {_range(best['loss'])}"
        model = f"--vocab-size {self.ladder.vocab_size} --seq-len {self.ladder.seq_len}"
        yield f"llmscale plan --law {shlex.quote(str(folder / LAW_NAME))} --flops {self.next_flops:.3g} {model}"

    def _schedule_lines(self) -> Iterator[str]:
        """Yield what losses from the middle of longer schedules would have said."""
        excess = [self.longer[run.name] / run.loss - 1 for run in self.runs if run.name in self.longer]
        if excess:
            yield (
                f"In the middle of a longer schedule the loss is {sum(excess) / len(excess):+.1%} beside that of runs "
                f"that end there ({min(excess):+.1%} to {max(excess):+.1%}, {count_nouns(len(excess), 'pair')})."
            )
        if self.exponents_by_schedule:
            own, longer = self.exponents_by_schedule
            yield f"Such losses would give a = {longer:.3f}; those of own schedules give {own:.3f} for the same sizes."

    def plot(self, folder: Path) -> None:
        """Write both pictures into a ladder's folder. Raises ConfigError without matplotlib."""
        pyplot = import_pyplot("--png and --svg need")
        figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
        _draw_groups(axes, self)
        _finish(axes, "parameters", "final validation loss by group, with parabolas where groups have equal compute")
        save_figure(figure, folder / ISOFLOP_NAME, "fit")
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.5, 5.2), layout="constrained")
        _draw_compute(left, self)
        _finish(left, "training FLOPs, 6 N D", "loss over compute: curves of runs, and the optimum with its 80 % range")
        _draw_schedules(right, self)
        _finish(right, "tokens", "dashed: the longest run of a size; dots: ends of runs with own schedules")
        save_figure(figure, folder / LOSS_NAME, "fit")


def fit_ladder(folder: Path, ladder: Ladder, resamples: int) -> LadderFit:
    """Fit the finished runs of a ladder. Raises ConfigError if they are too few."""
    notes: list[str] = []
    finished = {run.name: _read_finished(folder / RUNS_NAME / run.name, run, notes) for run in ladder.runs}
    runs = [done for run in ladder.runs if not run.is_held_out and (done := finished[run.name])]
    name = folder.resolve().name or "ladder"
    source = f"{count_nouns(len(runs), 'run')} on {ladder.data} ({ladder.tokenizer})"
    try:
        parametric = fit_parametric(runs, resamples, name, source)
    except ConfigError as error:
        raise ConfigError(f"{error} `llmscale ladder run {folder}` trains them. {' '.join(notes[:3])}") from None
    held_out = [run for run in ladder.runs if run.is_held_out]
    longer = longer_schedules(runs)
    has_groups = ladder.design == "isoflop"
    return LadderFit(
        ladder=ladder,
        runs=runs,
        parametric=parametric,
        isoflops=fit_isoflops(runs, resamples) if has_groups else None,
        longer=longer,
        exponents_by_schedule=schedule_exponents(runs, longer) if has_groups else None,
        predictions=[Prediction(run, parametric.predict(_loss_of(run)), finished[run.name]) for run in held_out],
        notes=notes,
    )


def _loss_of(run: LadderRun) -> Callable[[ParametricLaw], float]:
    return lambda law: law.loss(run.num_parameters, run.tokens)


@dataclass(frozen=True)
class RateFit:
    """Losses of a sweep's finished runs over their learning rates."""

    flops: float
    """Training FLOPs of each run."""
    num_parameters: int
    rates: list[float]
    losses: list[float]
    """Validation loss at the end of each rate's schedule, nats per token."""
    best: float | None
    """Rate of least loss; None without a lower and a higher rate of more loss."""
    parabola: Floats | None
    """Loss over ln lr, highest power first."""
    notes: list[str]

    @property
    def is_determined(self) -> bool:
        return self.best is not None

    def next_rates(self) -> dict[int, float]:
        """Return the best rates by size, for the next sizes with as many tokens per parameter: compute grows as N^2."""
        if self.best is None:
            return {}
        return {n * self.num_parameters: rate_at(self.best, self.flops, n * n * self.flops) for n in NEXT_SIZES}

    def write(self, folder: Path) -> None:
        """Write fit.json. Raises ConfigError."""
        values = {
            "losses": {f"{rate:g}": loss for rate, loss in zip(self.rates, self.losses, strict=True)},
            "best_lr": self.best,
            "next": [{"num_parameters": size, "lr": rate} for size, rate in self.next_rates().items()],
            "notes": self.notes,
        }
        write_output_file("fit", folder / FIT_NAME, json.dumps(values, allow_nan=False, indent=1) + "\n")

    def lines(self, folder: Path) -> Iterator[str]:
        """Yield the losses, the best rate, and those of the next sizes."""
        yield from self.notes
        least = min(self.losses, default=0.0)
        pairs = zip(self.rates, self.losses, strict=True)
        rows = [[f"{rate:.3g}", f"{loss:.4f}", f"{loss - least:+.4f}"] for rate, loss in pairs]
        yield from table_lines((Column("lr"), Column("loss"), Column("above the least")), rows, output_width())
        if self.best is None:
            if len(self.rates) < 3:
                yield "Three finished rates at least are needed for a minimum."
                return
            is_last = self.losses.index(least) > 0
            beyond = 2 * self.rates[-1] if is_last else self.rates[0] / 2
            yield f"No minimum: the {'largest' if is_last else 'smallest'} rate has the least loss. Try one beyond it:"
            yield f"llmscale ladder sweep {shlex.quote(str(folder))} --rates {beyond:.3g}"
            return
        yield (
            f"best: lr {self.best:.3g} for {format_quantity(self.num_parameters)} parameters and {self.flops:.3g} "
            "FLOPs, by a parabola through the least loss and its neighbours; each rate was trained once"
        )
        yield "next sizes, of as many tokens per parameter, by lr ~ C^-0.125 = N^-0.25 (DeepSeek-AI 2024, equation 1):"
        for size, rate in self.next_rates().items():
            yield f"  {format_quantity(size)} parameters: lr {rate:.3g}"

    def plot(self, folder: Path) -> None:
        """Write the loss over the learning rate into a sweep's folder. Raises ConfigError without matplotlib."""
        if not self.rates:
            return
        figure, axes = import_pyplot("--png and --svg need").subplots(figsize=(7.5, 5), layout="constrained")
        axes.plot(
            self.rates, self.losses, "o-", color=_BLUE, label=f"{format_quantity(self.num_parameters)} parameters"
        )
        if self.best is not None and self.parabola is not None:
            place = self.losses.index(min(self.losses))
            rates = np.geomspace(self.rates[place - 1], self.rates[place + 1], _POINTS)
            axes.plot(rates, np.polyval(self.parabola, np.log(rates)), color=_GREY)
            lowest = float(np.polyval(self.parabola, np.log(self.best)))
            axes.plot(self.best, lowest, "v", color=_ORANGE, markersize=9, label=f"lowest point: {self.best:.3g}")
        _finish(axes, "peak learning rate", "final validation loss, each rate with its own schedule")
        save_figure(figure, folder / RATES_NAME, "fit")


def fit_rates(folder: Path, ladder: Ladder) -> RateFit:
    """Fit the finished runs of a sweep."""
    notes: list[str] = []
    runs = [(run, _read_finished(folder / RUNS_NAME / run.name, run, notes)) for run in ladder.runs]
    rates = [run.lr for run, done in runs if done]
    losses = [done.loss for _, done in runs if done]
    best, parabola = best_rate(rates, losses) or (None, None)
    first = ladder.runs[0]
    return RateFit(first.flops, first.num_parameters, rates, losses, best, parabola, notes)


def _read_finished(folder: Path, run: LadderRun, notes: list[str]) -> FittedRun | None:
    """Return a finished run with its validations, or None after a note."""
    listed = read_run(folder)
    if listed.state != "finished" or listed.step != run.steps:
        is_unknown = listed.step is None and listed.state != "running"
        notes.append(f"{run.name} is left out: {'not started' if is_unknown else listed.state}.")
        return None
    try:
        history = load_history(folder)
    except ConfigError as error:
        notes.append(f"{run.name} is left out: {error}")
        return None
    losses = {step: loss for step, loss in history.validation.items() if step and 0 < loss <= _MOST_LOSS}
    if run.steps not in losses or history.tokens_seen.get(run.steps) != run.tokens:
        notes.append(f"{run.name} is left out: no validation after {run.steps:,} steps of the planned batch.")
        return None
    notes.extend(f"{run.name}: {note}." for note in history.notes())
    curve = tuple((run.tokens * (step / run.steps), losses[step]) for step in sorted(losses))
    return FittedRun(run.name, run.group, run.num_parameters, run.tokens, losses[run.steps], curve)


def _range(value: Interval) -> str:
    return f"{value.value:.4f} ({value.low:.4f}-{value.high:.4f})"


def _finish(axes: Axes, label: str, title: str) -> None:
    axes.set(xscale="log", xlabel=label, ylabel="validation loss, nats per token")
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def _colours(keys: set[float]) -> dict[float, tuple[float, ...]]:
    """Return a colour for each key, from dark to light."""
    from matplotlib import colormaps

    last = max(1, len(keys) - 1)
    return {key: colormaps["viridis"](0.9 * index / last) for index, key in enumerate(sorted(keys))}


def _draw_groups(axes: Axes, fit: LadderFit) -> None:
    for group, colour in _colours({run.group for run in fit.runs}).items():
        runs = [run for run in fit.runs if run.group == group]
        label = f"{runs[0].flops:.1e} FLOPs" if fit.isoflops else f"group {group}"
        axes.plot([r.num_parameters for r in runs], [r.loss for r in runs], "o", color=colour, label=label)
    if fit.isoflops:
        ends = [run.num_parameters for run in fit.runs]
        limits = axes.get_ylim()
        sizes = np.geomspace(min(ends), max(ends), _POINTS)
        for parabola in fit.isoflops.parabolas:
            axes.plot(sizes, np.polyval(parabola, np.log(sizes)), color=_GREY, linewidth=1)
        axes.plot(fit.isoflops.sizes, fit.isoflops.losses, "v:", color=_ORANGE, markersize=8, label="lowest points")
        axes.set_ylim(limits)


def _draw_compute(axes: Axes, fit: LadderFit) -> None:
    measured = [(item.measured, _ORANGE) for item in fit.predictions if item.measured]
    colours = _colours({run.num_parameters for run in fit.runs})
    for run, colour in [*((run, colours[run.num_parameters]) for run in fit.runs), *measured]:
        flops, losses = np.array(run.curve).T * [[6 * run.num_parameters], [1]]
        axes.plot(flops, losses, color=colour, alpha=0.5, linewidth=1)
        axes.plot(run.flops, run.loss, "o", color=colour, markersize=4)
    # As floats, which a law that is not determined may divide by zero without a warning: it counts as unlimited.
    budgets = np.geomspace(min(run.flops for run in fit.runs), 4 * fit.next_flops, _POINTS).tolist()
    optima = [fit.parametric.predict(partial(ParametricLaw.optimal_loss, flops=flops)) for flops in budgets]
    axes.plot(budgets, [at.value for at in optima], color=_BLUE, label="optimum by approach 3")
    axes.fill_between(budgets, [at.low for at in optima], [at.high for at in optima], color=_BLUE, alpha=0.2)
    for item in fit.predictions:
        value = item.predicted.value
        name = format_quantity(item.planned.num_parameters)
        errors = [[value - item.predicted.low], [item.predicted.high - value]]
        label = f"{name} parameters, held out: predicted{' and measured (dot)' if item.measured else ''}"
        axes.errorbar(item.planned.flops, value, errors, color=_ORANGE, capsize=5, label=label)
    axes.set_ylim(top=1.3 * max(run.loss for run in fit.runs))


def _draw_schedules(axes: Axes, fit: LadderFit) -> None:
    for size, colour in _colours({run.num_parameters for run in fit.runs if run.name in fit.longer}).items():
        runs = [run for run in fit.runs if run.num_parameters == size]
        axes.plot(*np.array(max(runs, key=lambda run: run.tokens).curve).T, "--", color=colour)
        label = f"{format_quantity(size)} parameters"
        axes.plot([run.tokens for run in runs], [run.loss for run in runs], "o", color=colour, label=label)
    axes.set_ylim(top=1.2 * max(run.loss for run in fit.runs))
