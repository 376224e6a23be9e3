"""Fit scaling laws to the final losses of a ladder's runs by Chinchilla's three approaches (Hoffmann et al. 2022).

1. `fit_envelope`: the run with the lowest loss at each compute, over the curves of all runs.
2. `fit_isoflops`: a parabola of the loss over ln N in each group of equal compute; its minimum is the optimal size.
3. `fit_parametric`: L = E + A / N^alpha + B / D^beta, by the Huber loss of ln L.

Intervals hold 80 %. Those of 2 and 3 resample residuals, because a ladder has few runs: without some of them a parabola
would not be determined. Residuals are inflated by sqrt(n / (n - p)) for the p numbers that were fitted, and by
Student's t over the normal distribution, because their size is itself known from n - p errors alone.
scripts/bench/learning/planted_ladders.py measures how often intervals then hold a planted law.

A resample knows the scatter of the runs, but not that the law itself may bend. So intervals of losses also contain an
error of a single run: the errors in the largest group of a law without this group, or the scatter if that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmscale.errors import ConfigError
from llmscale.planning.scaling import (
    EXPONENTS,
    LEAST_IRREDUCIBLE_LOSS,
    Z80,
    Coefficients,
    Interval,
    ParametricLaw,
    interval_of,
    training_flops,
)

Floats = NDArray[np.float64]

#: End of the Huber loss's quadratic part, in ln L (Hoffmann et al. 2022, section 3.3).
_HUBER_DELTA = 1e-3
_MOST_STEPS = 150
_STARTS_OF_RESAMPLE = 3
_SEED = 0
_FEWEST_RUNS = 6
_LEAST_LN_E = float(np.log(LEAST_IRREDUCIBLE_LOSS))
#: Logarithms of the least and the largest exponent; those beyond come from resamples that determine nothing.
_LN_EXPONENTS = (float(np.log(EXPONENTS[0])), float(np.log(EXPONENTS[1])))
#: Points of compute at which the envelope is read.
_ENVELOPE_POINTS = 60


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
    """Return the 90 % quantile of Student's t over the normal distribution's, for residuals with degrees of freedom.

    Source: Abramowitz and Stegun 1964, equation 26.7.5; 4 % too low for one degree, 0.1 % for three.
    """
    z, n = Z80, max(1, num_free)
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return 1 + (first + second + third) / z


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
        return _as_interval(self.law.estimate(quantity))

    def predict(self, quantity: Callable[[ParametricLaw], float]) -> Interval:
        """Return the loss of a run, with the interval of the fit's error and the run's own together."""
        return _as_interval(self.law.estimate_loss(quantity))


def _as_interval(value: Interval | float) -> Interval:
    assert isinstance(value, Interval), "a fit has resamples"
    return value


def fit_parametric(runs: Sequence[FittedRun], resamples: int, name: str, source: str) -> ParametricFit:
    """Fit approach 3. Raises ConfigError for fewer runs than it needs."""
    coefficients, resampled, residuals = _fit(runs, resamples)
    sizes = [run.num_parameters for run in runs]
    law = ParametricLaw(name, coefficients, None, source, (min(sizes), max(sizes)), resampled)
    misses = _backtest(runs)
    error = max(float(residuals.std()), float(np.sqrt(np.mean(np.log1p(misses) ** 2))) if misses else 0.0)
    return ParametricFit(replace(law, loss_error=error), residuals, misses)


def _backtest(runs: Sequence[FittedRun]) -> list[float]:
    """Return by which fractions the largest group's losses miss a fit to the smaller ones; none if these are few."""
    last = max(run.group for run in runs)
    smaller = [run for run in runs if run.group < last]
    if len(smaller) < _FEWEST_RUNS:
        return []
    law = ParametricLaw("", _fit(smaller, 1)[0], None, "")
    return [run.loss / law.loss(run.num_parameters, run.tokens) - 1 for run in runs if run.group == last]


def _fit(runs: Sequence[FittedRun], resamples: int) -> tuple[Coefficients, tuple[Coefficients, ...], Floats]:
    """Return coefficients, those of the resamples, and the inflated residuals of ln L [runs]. Raises ConfigError."""
    if len(runs) < _FEWEST_RUNS:
        raise ConfigError(f"{len(runs)} finished runs are too few for 5 coefficients; {_FEWEST_RUNS} are needed.")
    ln_sizes = np.log([(run.num_parameters, run.tokens) for run in runs])
    ln_loss, means = np.log([run.loss for run in runs]), ln_sizes.mean(axis=0)
    starts, centred = _starting_points(ln_loss), ln_sizes - means
    found, values = _minimise(starts, centred, ln_loss[None])
    order = np.argsort(values)
    best = found[order[:1]]
    fitted = _predict(best, centred)[0]
    residuals = _inflated(ln_loss - fitted[0], 5)
    spread = residuals * student_ratio(len(runs) - 5)
    drawn = fitted + np.random.default_rng(_SEED).choice(spread, (resamples, len(runs)))
    # Every resample starts at the fit itself and at other good starts.
    others = np.concatenate([best, starts[order[: _STARTS_OF_RESAMPLE - 1]]])
    found, values = _minimise(np.tile(others, (resamples, 1)), centred, np.repeat(drawn, len(others), axis=0))
    chosen = values.reshape(resamples, -1).argmin(axis=1) + np.arange(resamples) * len(others)
    rows = _coefficients(np.concatenate([best, found[chosen]]), means)
    rows[:, 2] = np.maximum(rows[:, 2], _LEAST_LN_E)
    first, *others = ((row[0], row[1], row[2], row[3], row[4]) for row in rows.tolist())
    return first, tuple(others), residuals


def _coefficients(x: Floats, means: Floats) -> Floats:
    """Return ln A, ln B, ln E, alpha, beta [batch, 5] of x [batch, 5].

    x is a, b, ln E, ln alpha, ln beta. a and b are the logarithms of both terms at the mean ln N and ln D, so that they
    hardly depend on the exponents.
    """
    exponents = np.exp(x[:, 3:])
    return np.concatenate([x[:, :2] + exponents * means, x[:, 2:3], exponents], axis=1)


def _predict(x: Floats, ln_sizes: Floats) -> tuple[Floats, Floats]:
    """Return ln L [batch, runs] and its slopes [batch, runs, 5] for x [batch, 5] and centred ln N, ln D [runs, 2]."""
    by_size = -np.exp(x[:, None, 3:]) * ln_sizes
    irreducible = np.broadcast_to(x[:, None, 2:3], (*by_size.shape[:2], 1))
    terms = np.concatenate([x[:, None, :2] + by_size, irreducible], axis=2)
    ln_loss = np.logaddexp.reduce(terms, axis=2)
    shares = np.exp(terms - ln_loss[:, :, None])
    return ln_loss, np.concatenate([shares, shares[:, :, :2] * by_size], axis=2)


def _starting_points(ln_loss: Floats) -> Floats:
    """Return a grid of starts [grid, 5]: shares of E, A and B in the loss, and exponents."""
    lowest, middle = np.exp(ln_loss.min()), np.exp(np.median(ln_loss))
    grid = np.meshgrid([0.2, 0.5, 0.8], [0.25, 0.75], [0.2, 0.5, 1.0], [0.2, 0.5, 1.0])
    share, of_size, alpha, beta = (axis.ravel() for axis in grid)
    rest = middle - share * lowest
    return np.log([rest * of_size, rest * (1 - of_size), share * lowest, alpha, beta]).T


def _minimise(x: Floats, ln_sizes: Floats, ln_loss: Floats) -> tuple[Floats, Floats]:
    """Minimise the Huber loss from starts x [batch, 5], each for its ln L [batch or 1, runs]; return both.

    Levenberg and Marquardt's steps, with squares weighted to the Huber loss's slope (Holland and Welsch 1977).
    """
    x = x.copy()
    values, damping, tried = np.full(len(x), np.inf), np.full(len(x), 1e-2), x
    errors, slopes = np.zeros((len(x), len(ln_sizes))), np.zeros((len(x), len(ln_sizes), 5))
    for _ in range(_MOST_STEPS):
        predicted, new_slopes = _predict(tried, ln_sizes)
        new_errors = (predicted - ln_loss) / _HUBER_DELTA
        size = np.abs(new_errors)
        new_values = np.where(size > 1, size - 0.5, new_errors**2 / 2).sum(axis=1)
        is_better = new_values < values
        x[is_better], values[is_better] = tried[is_better], new_values[is_better]
        errors[is_better], slopes[is_better] = new_errors[is_better], new_slopes[is_better]
        damping = np.clip(np.where(is_better, damping / 3, damping * 5), 1e-9, 1e9)
        weighted = slopes / np.maximum(1, np.abs(errors))[:, :, None]
        curvature = weighted.transpose(0, 2, 1) @ slopes
        damped = damping[:, None] * np.einsum("bii->bi", curvature) + 1e-12
        gradient = np.einsum("bni,bn->bi", weighted, errors) * _HUBER_DELTA
        step = np.linalg.solve(curvature + damped[:, :, None] * np.eye(5), gradient[:, :, None])[:, :, 0]
        tried = x - np.clip(step, -1, 1)
        tried[:, 3:] = np.clip(tried[:, 3:], *_LN_EXPONENTS)
    return x, values


# Approaches 1 and 2.


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
    flops, parabolas, fitted, errors = [], [], [], []
    for number in sorted({run.group for run in runs}):
        group = [run for run in runs if run.group == number]
        ln_sizes, losses = np.log([run.num_parameters for run in group]), np.array([run.loss for run in group])
        parabola = np.polyfit(ln_sizes, losses, 2) if len(set(ln_sizes)) >= 4 else np.zeros(3)
        if ln_sizes.min() <= _lowest(parabola[:, None])[0] <= ln_sizes.max():
            flops.append(float(np.exp(np.mean(np.log([run.flops for run in group])))))
            parabolas.append(parabola)
            fitted.append((ln_sizes, np.polyval(parabola, ln_sizes)))
            errors.append(losses - fitted[-1][1])
    if len(flops) < 2:
        return None
    together, num_fitted = np.concatenate(errors), 3 * len(flops)
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


def fit_envelope(runs: Sequence[FittedRun], resamples: int) -> Interval | None:
    """Return the exponent a by approach 1, resampling runs; None if one size is best at all amounts of compute."""
    ends, ln_sizes = [run.flops for run in runs], np.log([run.num_parameters for run in runs])
    flops = np.geomspace(min(ends), max(ends), _ENVELOPE_POINTS)
    losses = np.array([run.losses_at(flops / (6 * run.num_parameters)) for run in runs])

    def exponent(rows: NDArray[np.int64]) -> float:
        is_known = np.isfinite(losses[rows].min(axis=0))
        best = ln_sizes[rows][losses[rows].argmin(axis=0)][is_known]
        return _slope(flops[is_known], best) if len(set(best)) > 1 else np.nan

    value = exponent(np.arange(len(runs)))
    drawn = np.random.default_rng(_SEED).integers(0, len(runs), (resamples, len(runs)))
    return None if np.isnan(value) else interval_of(value, [exponent(rows) for rows in drawn])


# A schedule longer than the run.


def longer_schedules(runs: Sequence[FittedRun]) -> dict[str, float]:
    """Return the loss of longer runs of each run's size after as many tokens, by name of the run.

    A run counts that is at least half as long again and was validated before: there its learning rate was still high.
    The longest of them is read.
    """
    found = {}
    for run in runs:
        for other in sorted(runs, key=lambda run: run.tokens):
            loss = float(other.losses_at(np.array(run.tokens)))
            is_longer = other.num_parameters == run.num_parameters and other.tokens >= 1.5 * run.tokens
            if is_longer and np.isfinite(loss):
                found[run.name] = loss
    return found


def schedule_exponents(runs: Sequence[FittedRun], longer: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the exponent a by approach 2 with each run's own schedule, and with the losses of longer ones.

    Both use the same sizes: those that were also trained longer, and the group of the most compute. Kaplan et al.
    (2020) read losses from the middle of long schedules. None where too few sizes were trained longer.
    """
    last = max(run.group for run in runs)
    own = [run for run in runs if run.group == last or run.name in longer]
    misled = [replace(run, loss=longer.get(run.name, run.loss)) for run in own]
    by_own, by_longer = (fit_isoflops(chosen, 1) for chosen in (own, misled))
    return (by_own.exponent.value, by_longer.exponent.value) if by_own and by_longer else None
