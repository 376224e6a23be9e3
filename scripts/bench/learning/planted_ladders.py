"""Measure how often the 80 % intervals of `llmscale ladder fit` hold what was planted: made-up ladders of known laws.

    python -m scripts.bench.learning.planted_ladders --ladders 60

Each ladder has its own law, as real ones have, and losses with errors of --noise. Printed per design are the shares of
ladders whose intervals hold the planted alpha, beta, exponent a, loss and optimum of the next group's compute, and the
share in which another run's loss is within its prediction. Takes 1 s of processor time for a ladder of 15 runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np

from llmscale.planning.law_fit import FittedRun, fit_parametric
from llmscale.planning.scaling import ParametricLaw
from scripts.bench.harness import fraction

#: Groups and sizes of the designs.
_DESIGNS = ((3, 5), (4, 5), (3, 4), (2, 5), (2, 4), (2, 3))
_GROUP_RATIO, _SIZE_RATIO, _TOKENS_PER_PARAMETER = 4.0, 2.0, 20.0
_LEAST_FLOPS = 1e17


def plant_law(draw: np.random.Generator) -> ParametricLaw:
    """Draw a law whose three terms are all of the order of a nat in the ladder."""
    alpha, beta = draw.uniform(0.25, 0.5), draw.uniform(0.2, 0.5)
    of_size, of_data, irreducible = draw.uniform(0.5, 1.5), draw.uniform(0.5, 1.5), draw.uniform(1.2, 2.2)
    num_parameters = math.sqrt(_LEAST_FLOPS / 6 / _TOKENS_PER_PARAMETER)
    ln_a = math.log(of_size) + alpha * math.log(num_parameters)
    ln_b = math.log(of_data) + beta * math.log(_TOKENS_PER_PARAMETER * num_parameters)
    return ParametricLaw("planted", (ln_a, ln_b, math.log(irreducible), alpha, beta), None, "")


def train(law: ParametricLaw, groups: int, sizes: int, noise: float, draw: np.random.Generator) -> list[FittedRun]:
    """Return the runs of a ladder of equal compute per group."""
    return list(_runs(law, groups, sizes, noise, draw))


def _runs(law: ParametricLaw, groups: int, sizes: int, noise: float, draw: np.random.Generator) -> Iterator[FittedRun]:
    for group in range(groups):
        flops = _LEAST_FLOPS * _GROUP_RATIO**group
        middle = math.sqrt(flops / 6 / _TOKENS_PER_PARAMETER)
        for place in range(sizes):
            size = middle * _SIZE_RATIO ** (place - (sizes - 1) / 2)
            tokens = flops / 6 / size
            loss = law.loss(size, tokens) * math.exp(draw.normal(0, noise))
            yield FittedRun(f"{group}-{place}", group, size, tokens, loss, ((tokens, loss),))


def hold(groups: int, sizes: int, ladders: int, resamples: int, noise: float, seed: int) -> dict[str, float]:
    """Return the shares of planted ladders whose intervals hold the truth, by quantity."""
    draw = np.random.default_rng(seed)
    flops = _LEAST_FLOPS * _GROUP_RATIO**groups
    size = math.sqrt(flops / 6 / _TOKENS_PER_PARAMETER)
    tokens = flops / 6 / size
    quantities: dict[str, Callable[[ParametricLaw], float]] = {
        "alpha": lambda law: law.coefficients[3],
        "beta": lambda law: law.coefficients[4],
        "exponent a": lambda law: law.size_exponent,
        "law's loss": lambda law: law.loss(size, tokens),
        "optimum N": lambda law: law.optimal_parameters(flops),
    }
    held = dict.fromkeys([*quantities, "run's loss"], 0)
    for _ in range(ladders):
        law = plant_law(draw)
        fit = fit_parametric(train(law, groups, sizes, noise, draw), resamples, "planted", "")
        for name, quantity in quantities.items():
            interval = fit.interval(quantity)
            held[name] += interval.low <= quantity(law) <= interval.high
        predicted = fit.predict(quantities["law's loss"])
        held["run's loss"] += (
            predicted.low <= law.loss(size, tokens) * math.exp(draw.normal(0, noise)) <= predicted.high
        )
    return {name: count / ladders for name, count in held.items()}


def main() -> None:
    """Print a line per design."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladders", type=int, default=60)
    parser.add_argument("--resamples", type=int, default=100)
    parser.add_argument("--noise", type=fraction, default=0.002, help="standard deviation of ln L")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for groups, sizes in _DESIGNS:
        shares = hold(groups, sizes, args.ladders, args.resamples, args.noise, args.seed)
        words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        print(f"{groups} groups of {sizes}: {words}", flush=True)


if __name__ == "__main__":
    main()
