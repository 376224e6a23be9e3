"""Fit scaling laws to the final losses of a ladder's runs by Chinchilla's approaches 2 and 3 (Hoffmann et al. 2022).

2. `fit_isoflops`: a parabola of the loss over ln N in each group of equal compute; its minimum is the optimal size.
3. `fit_parametric`: L = E + A / N^alpha + B / D^beta, by the Huber loss of ln L. Needs scipy.

Intervals hold 80 %. Both resample residuals, because a ladder has few runs: without some of them a parabola would not
be determined. Residuals are inflated by sqrt(n / (n - p)) for the p numbers that were fitted, and by
Student's t over the normal distribution, because their size is itself known from n - p errors alone.
scripts/bench/learning/planted_ladders.py measures how often intervals then hold a planted law.

A resample knows the scatter of the runs, but not that the law itself may bend. So intervals of losses also contain an
error of a single run: the errors in the largest group of a law without this group, or the scatter if that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmscale.config.bundled_files import install_command
from llmscale.errors import ConfigError
from llmscale.planning.scaling import (
    EXPONENTS,
    LEAST_IRREDUCIBLE_LOSS,
    Coefficients,
    Interval,
    ParametricLaw,
    interval_of,
    training_flops,
)

Floats = NDArray[np.float64]

#: End of the Huber loss's quadratic part, in ln L (Hoffmann et al. 2022, section 3.3).
_HUBER_DELTA = 1e-3
_SEED = 0
_FEWEST_RUNS = 6
#: Bounds of a, b, ln E, ln alpha, ln beta; numbers at them come from resamples that determine nothing.
_LN_LEAST, _LN_MOST = np.log(EXPONENTS)
_LOWER = [-np.inf, -np.inf, np.log(LEAST_IRREDUCIBLE_LOSS), _LN_LEAST, _LN_LEAST]
_UPPER = [np.inf, np.inf, np.inf, _LN_MOST, _LN_MOST]


@dataclass(frozen=True)
class FittedRun:
    """A finished run."""

    name: str
    group: int
    num_parameters: float
    tokens: float
    loss: float
    """Validation loss at the end, nats per token."""
    curve: tuple[tuple[float, float], ...]
    """Tokens and loss of all validations, in order."""

    @property
    def flops(self) -> float:
        """Training FLOPs, 6 N D."""
        return training_flops(self.num_parameters, self.tokens)

    def losses_at(self, tokens: Floats) -> Floats:
        """Return losses [...] at token counts [...], interpolated over ln D; infinite outside of the curve."""
        at, losses = np.array(self.curve).T
        return np.asarray(np.interp(np.log(tokens), np.log(at), losses, left=np.inf, right=np.inf))


def _inflated(residuals: Floats, num_fitted: int) -> Floats:
    """Return centred residuals with the spread of the errors, which a fit reduces."""
    n = len(residuals)
    return (residuals - residuals.mean()) * np.sqrt(n / max(1, n - num_fitted))


def student_ratio(num_free: int) -> float:
    """Return the 90 % quantile of Student's t over the normal distribution's, for residuals with degrees of freedom."""
    from scipy import stats

    return float(stats.t.ppf(0.9, max(1, num_free)) / stats.norm.ppf(0.9))


# Approach 3.


@dataclass(frozen=True)
class ParametricFit:
    """Law of L = E + A / N^alpha + B / D^beta, with the errors of its runs."""

    law: ParametricLaw
    """Law with its resamples."""
    residuals: Floats
    """[runs]: errors of ln L, inflated."""
    misses: list[float]
    """Fractions by which the largest group's losses miss a law of the smaller groups; none if these are few."""

    def interval(self, quantity: Callable[[ParametricLaw], float]) -> Interval:
        """Return a quantity that follows from the law, with the interval of the fit's error."""
        interval = self.law.interval(quantity)
        assert interval is not None, "a fit has resamples"
        return interval

    def predict(self, quantity: Callable[[ParametricLaw], float]) -> Interval:
        """Return the loss of a run, with the interval of the fit's error and the run's own together."""
        interval = self.law.estimate_loss(quantity)
        assert isinstance(interval, Interval), "a fit has resamples"
        return interval


def fit_parametric(runs: Sequence[FittedRun], resamples: int, name: str, source: str) -> ParametricFit:
    """Fit approach 3. Raises ConfigError for fewer runs than it needs, and without scipy."""
    if find_spec("scipy") is None:
        raise ConfigError(f"`llmscale ladder fit` needs scipy: `{install_command('ladder')}`.")
    if len(runs) < _FEWEST_RUNS:
        raise ConfigError(f"{len(runs)} finished runs are too few for 5 coefficients; {_FEWEST_RUNS} are needed.")
    fit = _Fit(runs)
    sizes = [run.num_parameters for run in runs]
    law = ParametricLaw(
        name, fit.coefficients(fit.best), None, source, (min(sizes), max(sizes)), fit.resample(resamples)
    )
    misses = _backtest(runs)
    error = max(float(fit.residuals.std()), float(np.sqrt(np.mean(np.log1p(misses) ** 2))) if misses else 0.0)
    return ParametricFit(replace(law, loss_error=error), fit.residuals, misses)


def _backtest(runs: Sequence[FittedRun]) -> list[float]:
    """Return by which fractions the largest group's losses miss a fit to the smaller ones; none if these are few."""
    last = max(run.group for run in runs)
    smaller = [run for run in runs if run.group < last]
    if len(smaller) < _FEWEST_RUNS:
        return []
    fit = _Fit(smaller)
    law = ParametricLaw("", fit.coefficients(fit.best), None, "")
    return [run.loss / law.loss(run.num_parameters, run.tokens) - 1 for run in runs if run.group == last]


class _Fit:
    """The five numbers a, b, ln E, ln alpha, ln beta with the least Huber loss.

    a and b are the logarithms of both terms at the mean ln N and ln D, so that they hardly depend on the exponents.
    """

    def __init__(self, runs: Sequence[FittedRun]) -> None:
        ln_sizes = np.log([(run.num_parameters, run.tokens) for run in runs])
        ln_loss = np.log([run.loss for run in runs])
        self._means = ln_sizes.mean(axis=0)
        self._centred = ln_sizes - self._means
        fits = [self._minimise(start, ln_loss) for start in _starting_points(ln_loss)]
        self.best: Floats = min(fits, key=lambda fit: fit.cost).x
        self._fitted = self._predict(self.best)[0]
        self.residuals = _inflated(ln_loss - self._fitted, 5)
        """[runs]: errors of ln L, inflated."""

    def resample(self, count: int) -> tuple[Coefficients, ...]:
        """Return the coefficients of fits to losses with other errors; each fit starts at the best one."""
        num_runs = len(self.residuals)
        spread = self.residuals * student_ratio(num_runs - 5)
        errors = np.random.default_rng(_SEED).choice(spread, (count, num_runs))
        return tuple(self.coefficients(self._minimise(self.best, self._fitted + row).x) for row in errors)

    def coefficients(self, x: Floats) -> Coefficients:
        """Return ln A, ln B, ln E, alpha, beta."""
        alpha, beta = np.exp(x[3:]).tolist()
        ln_a, ln_b = (x[:2] + (alpha, beta) * self._means).tolist()
        return ln_a, ln_b, float(x[2]), alpha, beta

    def _minimise(self, start: Floats, ln_loss: Floats) -> Any:
        from scipy.optimize import least_squares

        return least_squares(
            lambda x: (self._predict(x)[0] - ln_loss) / _HUBER_DELTA,
            start,
            lambda x: self._predict(x)[1] / _HUBER_DELTA,
            bounds=(_LOWER, _UPPER),
            loss="huber",
        )

    def _predict(self, x: Floats) -> tuple[Floats, Floats]:
        """Return ln L [runs] and its slopes [runs, 5]."""
        by_size = -np.exp(x[3:]) * self._centred
        terms = np.column_stack([x[:2] + by_size, np.full(len(by_size), x[2])])
        ln_loss = np.logaddexp.reduce(terms, axis=1)
        shares = np.exp(terms - ln_loss[:, None])
        return ln_loss, np.column_stack([shares, shares[:, :2] * by_size])


def _starting_points(ln_loss: Floats) -> Floats:
    """Return a grid of starts [grid, 5]: shares of E, A and B in the loss, and exponents."""
    lowest = np.exp(ln_loss.min())
    middle = np.exp(np.median(ln_loss))
    grid = np.meshgrid([0.2, 0.5, 0.8], [0.25, 0.75], [0.25, 0.8], [0.25, 0.8])
    share, of_size, alpha, beta = (axis.ravel() for axis in grid)
    rest = middle - share * lowest
    return np.log([rest * of_size, rest * (1 - of_size), share * lowest, alpha, beta]).T


# Approach 2.


@dataclass(frozen=True)
class IsoflopFit:
    """Optimal sizes of groups of equal compute, and the power law N* = k C^a through them."""

    sizes: Floats
    """[groups]: N*."""
    losses: Floats
    """[groups]: loss at N*."""
    exponent: Interval
    """a."""
    parabolas: Floats
    """[groups, 3]: loss over ln N, highest power first."""


def fit_isoflops(runs: Sequence[FittedRun], resamples: int) -> IsoflopFit | None:
    """Fit approach 2; None without two groups of at least four sizes whose parabolas are lowest within the sizes."""
    flops = []
    parabolas = []
    fitted = []
    errors = []
    for number in sorted({run.group for run in runs}):
        group = [run for run in runs if run.group == number]
        ln_sizes = np.log([run.num_parameters for run in group])
        losses = np.array([run.loss for run in group])
        if len(set(ln_sizes)) >= 4:
            parabola = np.polyfit(ln_sizes, losses, 2)
        else:
            parabola = np.zeros(3)
        if ln_sizes.min() <= _lowest(parabola[:, None])[0] <= ln_sizes.max():
            flops.append(float(np.exp(np.mean(np.log([run.flops for run in group])))))
            parabolas.append(parabola)
            fitted.append((ln_sizes, np.polyval(parabola, ln_sizes)))
            errors.append(losses - fitted[-1][1])
    if len(flops) < 2:
        return None
    together = np.concatenate(errors)
    num_fitted = 3 * len(flops)
    residuals = _inflated(together, num_fitted) * student_ratio(len(together) - num_fitted)
    rng = np.random.default_rng(_SEED)
    resampled = [
        _lowest(np.polyfit(ln_sizes, (losses + rng.choice(residuals, (resamples, len(losses)))).T, 2))
        for ln_sizes, losses in fitted
    ]
    central = _lowest(np.array(parabolas).T)
    losses = np.array([np.polyval(parabola, at) for parabola, at in zip(parabolas, central, strict=True)])
    exponent = interval_of(_slope(flops, central), [_slope(flops, row) for row in np.array(resampled).T])
    return IsoflopFit(np.exp(central), losses, exponent, np.array(parabolas))


def _lowest(parabolas: Floats) -> Floats:
    """Return where parabolas [3, batch] are lowest; NaN for those that open downwards."""
    is_open = parabolas[0] > 0
    return np.where(is_open, -parabolas[1] / np.where(is_open, 2 * parabolas[0], 1.0), np.nan)


def _slope(flops: Sequence[float] | Floats, ln_sizes: Floats) -> float:
    """Return the exponent of the power law through sizes [points] over compute [points]."""
    centred = np.log(flops) - np.log(flops).mean()
    return float((ln_sizes * centred).sum() / (centred**2).sum())


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, Floats] | None:
    """Return the learning rate of least loss and its parabola [3] over ln lr, through the lowest rate and its
    neighbours. None if the lowest rate is the first or the last of the ascending `rates`."""
    if len(losses):
        place = int(np.argmin(losses))
    else:
        place = 0
    if not 0 < place < len(rates) - 1:
        return None
    nearest = slice(place - 1, place + 2)
    parabola = np.polyfit(np.log(rates[nearest]), losses[nearest], 2)
    return float(np.exp(_lowest(parabola[:, None])[0])), parabola


# A schedule longer than the run.


def longer_schedules(runs: Sequence[FittedRun]) -> dict[str, float]:
    """Return the loss of longer runs of each run's size after as many tokens, by name of the run.

    A run counts that is at least half as long again and was validated before: there its learning rate was still high.
    The longest of them is read.
    """
    losses = {}
    for run in runs:
        for other in sorted(runs, key=lambda run: run.tokens):
            loss = float(other.losses_at(np.array(run.tokens)))
            is_longer = other.num_parameters == run.num_parameters and other.tokens >= 1.5 * run.tokens
            if is_longer and np.isfinite(loss):
                losses[run.name] = loss
    return losses


def schedule_exponents(runs: Sequence[FittedRun], longer: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the exponent a by approach 2 with each run's own schedule, and with the losses of longer ones.

    Both use the same sizes: those that were also trained longer, and the group of the most compute. Kaplan et al.
    (2020) read losses from the middle of long schedules. None where too few sizes were trained longer.
    """
    last = max(run.group for run in runs)
    own = [run for run in runs if run.group == last or run.name in longer]
    misled = [replace(run, loss=longer.get(run.name, run.loss)) for run in own]
    by_own, by_longer = (fit_isoflops(chosen, 1) for chosen in (own, misled))
    if by_own and by_longer:
        return (by_own.exponent.value, by_longer.exponent.value)
    return None
