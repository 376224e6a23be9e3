"""Loss as a function of parameters N and training tokens D, and what is optimal for a budget C = 6 N D. No torch.

    L(N, D) = E + A / N^alpha + B / D^beta        (nats per token; Hoffmann et al. 2022, "Chinchilla", approach 3)

The optimum has N* = G (C/6)^(beta/(alpha+beta)), D* = C / (6 N*), G = (alpha A / (beta B))^(1/(alpha+beta)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llmscale.errors import ConfigError
from llmscale.planning.flops import PF_DAY_FLOPS, training_flops

#: In this order: ln A, ln B, ln E, alpha, beta.
Coefficients = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Interval:
    """A value and the range that holds it with 80 % probability, of the fit's errors alone."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """A model of N parameters trained on D tokens."""

    num_parameters: float
    tokens: float
    loss: float
    """Nats per token that a law expects."""

    @property
    def flops(self) -> float:
        """6 N D."""
        return training_flops(self.num_parameters, self.tokens)


@dataclass(frozen=True)
class ParametricLaw:
    """One fit of L = E + A / N^alpha + B / D^beta."""

    name: str
    coefficients: Coefficients
    covariance: tuple[tuple[float, ...], ...] | None
    """Of the coefficients' errors; None: not published."""
    source: str

    def loss(self, num_parameters: float, tokens: float) -> float:
        """Nats per token."""
        ln_a, ln_b, ln_e, alpha, beta = self.coefficients
        return (
            math.exp(ln_e)
            + math.exp(ln_a - alpha * math.log(num_parameters))
            + math.exp(ln_b - beta * math.log(tokens))
        )

    @property
    def irreducible_loss(self) -> float:
        """E: what no size and no amount of data gets below."""
        return math.exp(self.coefficients[2])

    def optimal_parameters(self, flops: float) -> float:
        """N* of a training budget."""
        return math.exp(_ln_optimal_parameters(self.coefficients, flops))

    def optimal_tokens(self, flops: float) -> float:
        """D* of a training budget."""
        return flops / (6 * self.optimal_parameters(flops))

    def optimal_loss(self, flops: float) -> float:
        """Loss of the optimum of a training budget."""
        return self.loss(self.optimal_parameters(flops), self.optimal_tokens(flops))

    def flops_for_parameters(self, num_parameters: float) -> float:
        """The budget whose optimum has that many parameters."""
        _, _, _, alpha, beta = self.coefficients
        excess = math.log(num_parameters) - _ln_optimal_parameters(self.coefficients, 6.0)
        return 6 * math.exp(excess * (alpha + beta) / beta)

    def flops_for_tokens(self, tokens: float) -> float:
        """The budget whose optimum has that many tokens: D* = (C/6)^(alpha/(alpha+beta)) / G."""
        _, _, _, alpha, beta = self.coefficients
        ln_g = _ln_optimal_parameters(self.coefficients, 6.0)
        return 6 * math.exp((math.log(tokens) + ln_g) * (alpha + beta) / alpha)

    def flops_for_loss(self, loss: float) -> float:
        """The least budget that reaches a loss. Raises ConfigError when none does."""
        if loss <= self.irreducible_loss:
            raise ConfigError(
                f"a loss of {loss:g} nats per token cannot be reached: in the fit of {self.name}, no model gets below "
                f"{self.irreducible_loss:.2f}. Choose a higher loss."
            )
        highest = self.optimal_loss(1.0)
        if not loss < highest:
            raise ConfigError(f"a loss of {loss:g} nats per token needs no training; choose one below {highest:.1f}.")
        # Along the optimum, both terms fall as the same power of C, and so does their sum.
        _, _, _, alpha, beta = self.coefficients
        power = alpha * beta / (alpha + beta)
        one = highest - self.irreducible_loss
        return math.exp(math.log(one / (loss - self.irreducible_loss)) / power)

    def tokens_for_loss(self, num_parameters: float, loss: float) -> float | None:
        """Tokens after which a model of that size reaches a loss; None when it never does."""
        ln_a, ln_b, _, alpha, beta = self.coefficients
        left = loss - self.irreducible_loss - math.exp(ln_a - alpha * math.log(num_parameters))
        return math.exp((ln_b - math.log(left)) / beta) if left > 0 else None

    def interval(self, quantity: Callable[[ParametricLaw], float]) -> Interval | None:
        """80 % interval of a positive quantity that follows from this law; None without a covariance.

        Delta method on the logarithm: its gradient in the five coefficients, by central differences, with their
        covariance. The errors of N* are nearly symmetric in the logarithm, not in N* itself.
        """
        if self.covariance is None:
            return None
        gradient = [self._slope(quantity, index) for index in range(len(self.coefficients))]
        variance = sum(
            gradient[i] * gradient[j] * self.covariance[i][j]
            for i in range(len(gradient))
            for j in range(len(gradient))
        )
        value, factor = quantity(self), math.exp(_Z80 * math.sqrt(max(0.0, variance)))
        return Interval(value, value / factor, value * factor)

    def _slope(self, quantity: Callable[[ParametricLaw], float], index: int) -> float:
        step = 1e-5

        def at(sign: int) -> float:
            moved = list(self.coefficients)
            moved[index] += sign * step
            shifted: Coefficients = (moved[0], moved[1], moved[2], moved[3], moved[4])
            return math.log(quantity(ParametricLaw(self.name, shifted, None, self.source)))

        return (at(1) - at(-1)) / (2 * step)


#: Standard deviations that hold 80 % of a normal distribution.
_Z80 = 1.2816


def _ln_optimal_parameters(coefficients: Coefficients, flops: float) -> float:
    ln_a, ln_b, _, alpha, beta = coefficients
    ln_g = (math.log(alpha) + ln_a - math.log(beta) - ln_b) / (alpha + beta)
    return ln_g + beta / (alpha + beta) * math.log(flops / 6)


def _logs(a: float, b: float, e: float, alpha: float, beta: float) -> Coefficients:
    return (math.log(a), math.log(b), math.log(e), alpha, beta)


#: Covariance of (ln A, ln B, ln E, alpha, beta): a bootstrap of 4,000 resamples of the 240 points that Besiroglu et al.
#: published (github.com/epoch-research/analyzing-chinchilla, data/svg_extracted_data.csv without its five highest
#: losses), refitted with their Huber loss. Its standard errors are theirs (A 121 for 125, B 1,338 for 1,293, E .026,
#: alpha .015, beta .021). Errors of A and alpha, and of B and beta, are correlated by more than .999: carried through
#: as if independent, they would make Chinchilla's N* uncertain by a factor of 5.5 where it is by 1.3.
_BESIROGLU_COVARIANCE = (
    (6.38873525e-02, -2.63540576e-02, 2.05089887e-03, 3.80929507e-03, -1.32198454e-03),
    (-2.63540576e-02, 1.79310959e-01, 3.74749182e-03, -1.63941779e-03, 8.77113624e-03),
    (2.05089887e-03, 3.74749182e-03, 1.99478516e-04, 1.21048164e-04, 1.82634013e-04),
    (3.80929507e-03, -1.63941779e-03, 1.21048164e-04, 2.27438311e-04, -8.22893514e-05),
    (-1.32198454e-03, 8.77113624e-03, 1.82634013e-04, -8.22893514e-05, 4.29322144e-04),
)

BESIROGLU = ParametricLaw(
    "Besiroglu 2024",
    _logs(482.01, 2085.43, 1.8172, 0.3478, 0.3658),
    _BESIROGLU_COVARIANCE,
    "Besiroglu et al. 2024, arXiv:2404.10102: approach 3 fitted again to the points of the paper's figure",
)
HOFFMANN = ParametricLaw(
    "Hoffmann 2022",
    _logs(406.4, 410.7, 1.6934, 0.3392, 0.2849),
    None,
    "Hoffmann et al. 2022, arXiv:2203.15556, approach 3 with the exponents of the TeX source",
)
HOFFMANN_ROUNDED = ParametricLaw(
    "Hoffmann 2022, rounded",
    _logs(406.4, 410.7, 1.69, 0.34, 0.28),
    None,
    "Hoffmann et al. 2022, equation 10 as printed: rounding alone shifts the optimum",
)
LAWS = (BESIROGLU, HOFFMANN, HOFFMANN_ROUNDED)

#: Training runs that the parametric fits rest on (Hoffmann et al. 2022, section 3): beyond, they extrapolate.
FITTED_PARAMETERS = (44e6, 16e9)


@dataclass(frozen=True)
class KaplanLaw:
    """N = 1.3e9 C^.73 for C in PF-days (Kaplan et al. 2020, table 6). N counts no embeddings."""

    name: str = "Kaplan 2020"
    source: str = "Kaplan et al. 2020, arXiv:2001.08361"
    why_it_differs: str = (
        "it leaves the embeddings and the output head out of N and C, which matter in its small models (Pearce and "
        "Song 2024), and trained with one schedule and a warm-up too long for them, untuned for each size (Hoffmann et "
        "al. 2022; Porian et al. 2024); so it grows the model too fast"
    )

    def optimal_parameters(self, flops: float) -> float:
        """Non-embedding parameters of a training budget's optimum."""
        return 1.3e9 * math.pow(flops / PF_DAY_FLOPS, 0.73)

    def optimal_tokens(self, flops: float) -> float:
        """The tokens that are left of the budget."""
        return flops / (6 * self.optimal_parameters(flops))


KAPLAN = KaplanLaw()
