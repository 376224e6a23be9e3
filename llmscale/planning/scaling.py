"""Scaling laws: loss as a function of parameters N and training tokens D, optimal models, and their shapes. No torch.

    L(N, D) = E + A / N^alpha + B / D^beta        (nats per token; Hoffmann et al. 2022, "Chinchilla", approach 3)

A budget of C = 6 N D FLOPs has its optimum at N* = G (C/6)^(beta/(alpha+beta)), D* = C / (6 N*), with
G = (alpha A / (beta B))^(1/(alpha+beta)). A parameter takes part in one multiply-accumulate (2 FLOPs) per token in the
forward pass and in two in the backward pass. Attention's FLOPs (`GPTShape.flops_per_token`) and recomputation are not
in C.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

from llmscale import limits
from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.terminal.human_numbers import format_quantity

#: A petaflop/s for a day (Kaplan et al. 2020, OpenAI's unit).
PF_DAY_FLOPS = 1e15 * 86_400
#: Sizes of the runs that the parametric fits rest on (Hoffmann et al. 2022, section 3).
FITTED_PARAMETERS = (44e6, 16e9)
#: Bounds of a fit's exponents and least irreducible loss in nats per token: a law that reaches one is not determined.
EXPONENTS = (0.01, 5.0)
LEAST_IRREDUCIBLE_LOSS = 1e-3
#: Standard deviations that hold 80 % of a normal distribution.
Z80 = 1.2816
#: Value of a quantity that overflows for a law, which determines nothing.
LARGEST = 1e300
#: Covariance of (ln A, ln B, ln E, alpha, beta): a bootstrap of 4,000 resamples of the 240 points that Besiroglu et al.
#: published (github.com/epoch-research/analyzing-chinchilla, data/svg_extracted_data.csv without its five highest
#: losses), refitted with their Huber loss. Its standard errors are theirs (A 121 for 125, B 1,338 for 1,293, E .026,
#: alpha .015, beta .021). Errors of A and alpha, and of B and beta, are correlated by more than .999: treated as
#: independent, they would make Chinchilla's N* uncertain by a factor of 5.5 instead of 1.3.
_BESIROGLU_COVARIANCE = (
    (6.38873525e-02, -2.63540576e-02, 2.05089887e-03, 3.80929507e-03, -1.32198454e-03),
    (-2.63540576e-02, 1.79310959e-01, 3.74749182e-03, -1.63941779e-03, 8.77113624e-03),
    (2.05089887e-03, 3.74749182e-03, 1.99478516e-04, 1.21048164e-04, 1.82634013e-04),
    (3.80929507e-03, -1.63941779e-03, 1.21048164e-04, 2.27438311e-04, -8.22893514e-05),
    (-1.32198454e-03, 8.77113624e-03, 1.82634013e-04, -8.22893514e-05, 4.29322144e-04),
)
#: Fit of L = a Ê^delta N^(alpha + gamma ln Ê) + b Ê^omega D^(beta + zeta ln Ê) + c to 280 runs of 1 to 32 experts of an
#: MLP's width, one per token: 79M to 2.7B active parameters, 0.5B to 80B tokens (Ludziejewski et al. 2025,
#: arXiv:2502.05172, equation 6 and table 3).
_JOINT_N = (35.91, -0.1889, -0.2285, 0.0098)
_JOINT_D = (35.98, -0.1775, 0.5529, -0.0259)
_JOINT_C = 1.3637
#: Ê at 1 expert, and at infinitely many.
_EXPERTS_START = 2.0732
_EXPERTS_MAX = 290.4521
#: Largest ratio of all experts to those of a token in these runs.
FITTED_EXPANSION = 32
#: ln D between which a goal is searched; 64 halvings leave 1e-17 of it.
_LN_TOKENS = (-40.0, 90.0)
_BISECTIONS = 64
#: Widths are multiples of this, so that heads of 64 and 128 fit.
WIDTH_MULTIPLE = 128
#: Width of about 26,000B parameters, more than any machine trains today.
LARGEST_WIDTH = 65_536
GPT3 = "gpt3"
#: Families whose presets have their own sizes. The others' sizes are GPT-2's, which GPT-3 continues, or for tests.
_OWN_SIZES = ("llama3", "qwen3", "smollm2")
#: Sizes of such a family that follow the width: all query heads, all key heads, MLP, depth.
_SCALED: tuple[Callable[[GPTShape], int], ...] = (
    lambda shape: shape.n_head * shape.head_dim,
    lambda shape: shape.n_kv_head * shape.head_dim,
    lambda shape: shape.mlp_width,
    lambda shape: shape.n_layer,
)
#: Least depth of a suggestion: GPT-3's depths say nothing below its smallest width. Below 64 it is a block per 16.
_LEAST_DEPTH = 4
_WIDTHS = (
    *range(WIDTH_MULTIPLE, 2048, WIDTH_MULTIPLE),
    *range(2048, 4096, 2 * WIDTH_MULTIPLE),
    *range(4096, LARGEST_WIDTH + 1, 4 * WIDTH_MULTIPLE),
)
#: Widths of the smallest models of a scaling ladder, each with one head.
NARROW_WIDTHS = (8, 12, 16, 24, 32, 48, 64, 80, 96, 112)


def training_flops(num_parameters: float, tokens: float) -> float:
    """Return 6 N D as a float: forward and backward passes. numpy takes no integers beyond 64 bits."""
    return 6.0 * num_parameters * tokens


def inference_flops(num_parameters: float, tokens: float) -> float:
    """Return 2 N D: forward passes, without attention over the context."""
    return 2.0 * num_parameters * tokens


def affordable_tokens(flops: float, num_parameters: float) -> float:
    """Return the tokens on which a budget trains a model of that size."""
    return flops / (6 * num_parameters)


# Laws.


#: ln A, ln B, ln E, alpha, beta.
Coefficients = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Interval:
    """Value with the range that holds it with 80 % probability, if the law's form is right."""

    value: float
    low: float
    high: float


def interval_of(value: float, samples: Iterable[float]) -> Interval:
    """Return a value with the 80 % range of its finite resamples, interpolated between neighbours."""
    known = sorted(sample for sample in samples if math.isfinite(sample))

    def quantile(fraction: float) -> float:
        below, share = divmod(fraction * (len(known) - 1), 1)
        low = known[int(below)]
        high = known[min(int(below) + 1, len(known) - 1)]
        return low + share * (high - low)

    if known:
        return Interval(value, quantile(0.1), quantile(0.9))
    return Interval(value, -math.inf, math.inf)


@dataclass(frozen=True)
class Point:
    """Model of N parameters trained on D tokens."""

    DERIVED: ClassVar = ("flops",)

    num_parameters: float
    tokens: float
    loss: float
    """Nats per token expected by a law."""

    @property
    def flops(self) -> float:
        """Training FLOPs, 6 N D."""
        return training_flops(self.num_parameters, self.tokens)


@dataclass(frozen=True)
class ParametricLaw:
    """A fit of L = E + A / N^alpha + B / D^beta."""

    name: str
    coefficients: Coefficients
    covariance: tuple[tuple[float, ...], ...] | None
    """Covariance of the coefficients' errors; None if not published."""
    source: str
    fitted_parameters: tuple[float, float] = FITTED_PARAMETERS
    """Smallest and largest model of the fit, beyond which the law extrapolates."""
    resamples: tuple[Coefficients, ...] = ()
    """Coefficients of fits to resampled losses, for intervals in place of the covariance."""
    loss_error: float = 0.0
    """Standard deviation of a larger run's ln L from the law, as seen in the fit's own runs; 0 if unknown."""

    def loss(self, num_parameters: float, tokens: float) -> float:
        """Return the loss in nats per token."""
        ln_a, ln_b, ln_e, alpha, beta = self.coefficients
        return (
            math.exp(ln_e)
            + math.exp(ln_a - alpha * math.log(num_parameters))
            + math.exp(ln_b - beta * math.log(tokens))
        )

    @property
    def irreducible_loss(self) -> float:
        """Loss E that no size and no amount of data goes below."""
        return math.exp(self.coefficients[2])

    @property
    def size_exponent(self) -> float:
        """Exponent a of N* = k C^a."""
        alpha, beta = self.coefficients[3:]
        return beta / (alpha + beta)

    def optimal_parameters(self, flops: float) -> float:
        """Return N* of a training budget."""
        return math.exp(_ln_optimal_parameters(self.coefficients, flops))

    def optimal_tokens(self, flops: float) -> float:
        """Return D* of a training budget."""
        # A refit of few runs may put the optimum below the smallest float.
        return float(flops) / (6 * max(self.optimal_parameters(flops), sys.float_info.min))

    def optimal_loss(self, flops: float) -> float:
        """Return the loss of a training budget's optimum."""
        return self.loss(self.optimal_parameters(flops), self.optimal_tokens(flops))

    def tokens_for_loss(self, num_parameters: float, loss: float) -> float | None:
        """Return the tokens after which a model of that size reaches a loss; None if it never does."""
        ln_a, ln_b, _, alpha, beta = self.coefficients
        left = loss - self.irreducible_loss - math.exp(ln_a - alpha * math.log(num_parameters))
        if left > 0:
            return math.exp((ln_b - math.log(left)) / beta)
        return None

    def interval(self, quantity: Callable[[ParametricLaw], float]) -> Interval | None:
        """Return the 80 % interval of a positive quantity that follows from this law; None if its errors are unknown.

        It is the range over the resamples. With a covariance alone, it is the delta method on the logarithm: the
        gradient in the five coefficients, by central differences, with their covariance. The errors of N* are nearly
        symmetric in the logarithm, not in N*.
        """
        if self.resamples:
            laws = (replace(self, coefficients=row, resamples=()) for row in self.resamples)
            return interval_of(_limited(quantity, self), (_limited(quantity, law) for law in laws))
        if self.covariance is None:
            return None
        gradient = [self._slope(quantity, index) for index in range(len(self.coefficients))]
        variance = sum(
            gradient[i] * gradient[j] * self.covariance[i][j]
            for i in range(len(gradient))
            for j in range(len(gradient))
        )
        value = quantity(self)
        factor = math.exp(Z80 * math.sqrt(max(0.0, variance)))
        return Interval(value, value / factor, value * factor)

    def estimate(self, quantity: Callable[[ParametricLaw], float]) -> Interval | float:
        """Return a quantity that follows from this law, with its interval if the law's errors are known."""
        return self.interval(quantity) or quantity(self)

    def estimate_loss(self, quantity: Callable[[ParametricLaw], float]) -> Interval | float:
        """Return a loss that follows from this law, with the interval of a run's own loss if errors are known.

        The interval combines the fit's error and `loss_error`, as independent errors of ln L.
        """
        fit = self.interval(quantity)
        if not fit or not self.loss_error:
            return fit or quantity(self)
        below, above = (
            math.exp(math.hypot(math.log(end / fit.value), Z80 * self.loss_error)) for end in (fit.low, fit.high)
        )
        return Interval(fit.value, fit.value / below, min(fit.value * above, LARGEST))

    def _slope(self, quantity: Callable[[ParametricLaw], float], index: int) -> float:
        step = 1e-5

        def at(sign: int) -> float:
            moved = list(self.coefficients)
            moved[index] += sign * step
            shifted: Coefficients = (moved[0], moved[1], moved[2], moved[3], moved[4])
            return math.log(quantity(ParametricLaw(self.name, shifted, None, self.source)))

        return (at(1) - at(-1)) / (2 * step)


def _limited(quantity: Callable[[ParametricLaw], float], law: ParametricLaw) -> float:
    """Return a quantity, at most LARGEST."""
    try:
        return min(quantity(law), LARGEST)
    except (OverflowError, ValueError, ZeroDivisionError):
        # exp overflows, or N* is so small that it is 0.
        return LARGEST


def _ln_optimal_parameters(coefficients: Coefficients, flops: float) -> float:
    ln_a, ln_b, _, alpha, beta = coefficients
    ln_g = (math.log(alpha) + ln_a - math.log(beta) - ln_b) / (alpha + beta)
    return ln_g + beta / (alpha + beta) * math.log(flops / 6)


def _logs(a: float, b: float, e: float, alpha: float, beta: float) -> Coefficients:
    return (math.log(a), math.log(b), math.log(e), alpha, beta)


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


def expansion_of(shape: GPTShape) -> float:
    """Return how many times the width of the MLPs that a token takes all MLPs of a block have; 1 without experts."""
    if not shape.num_experts:
        return 1.0
    shared = shape.shared_expert_width
    chosen = shape.experts_per_token * shape.expert_width + shared
    return (shape.num_experts * shape.expert_width + shared) / chosen


def law_with_experts(expansion: float) -> ParametricLaw:
    """Return the law of models with that expansion in active parameters N, embeddings included.

    Its losses compare models with each other, not with the losses of other laws: text and tokenizer are its own.
    """
    transformed = expansion - 1 + 1 / (1 / _EXPERTS_START - 1 / _EXPERTS_MAX)
    log = -math.log(1 / transformed + 1 / _EXPERTS_MAX)
    (a, alpha, delta, gamma), (b, beta, omega, zeta) = _JOINT_N, _JOINT_D
    return ParametricLaw(
        f"Ludziejewski 2025, {expansion:.3g} x experts",
        _logs(
            a * math.exp(delta * log),
            b * math.exp(omega * log),
            _JOINT_C,
            -alpha - gamma * log,
            -beta - zeta * log,
        ),
        None,
        "Ludziejewski et al. 2025, arXiv:2502.05172: N are active parameters",
        (79e6, 2.7e9),
    )


def dense_equivalent(shape: GPTShape, tokens: float) -> float:
    """Return the parameters of the dense model with the same loss after as many tokens, by `law_with_experts`.

    Infinite where no dense model reaches it.
    """
    if not shape.num_experts:
        return shape.num_parameters
    dense = law_with_experts(1.0)
    ln_a, ln_b, _, alpha, beta = dense.coefficients
    loss = law_with_experts(expansion_of(shape)).loss(shape.active_parameters, tokens)
    left = loss - dense.irreducible_loss - math.exp(ln_b - beta * math.log(tokens))
    if left > 0:
        return math.exp((ln_a - math.log(left)) / alpha)
    return math.inf


@dataclass(frozen=True)
class KaplanLaw:
    """N = 1.3e9 C^.73 without embeddings, L = (3.1e8 / C)^.050, for C in PF-days (Kaplan et al. 2020, tables 5, 6)."""

    name: str = "Kaplan 2020"
    source: str = "Kaplan et al. 2020, arXiv:2001.08361"
    why_it_differs: str = (
        "it leaves the embeddings and the output head out of N and C, which matter in its small models (Pearce and "
        "Song 2024), and trained with one schedule and a warm-up too long for them, untuned for each size (Hoffmann et "
        "al. 2022; Porian et al. 2024); so it grows the model too fast"
    )

    def optimal_parameters(self, flops: float) -> float:
        """Return the non-embedding parameters of a training budget's optimum."""
        return 1.3e9 * math.pow(flops / PF_DAY_FLOPS, 0.73)

    def optimal_tokens(self, flops: float) -> float:
        """Return the tokens that the rest of the budget pays for."""
        return flops / (6 * self.optimal_parameters(flops))

    def optimal_loss(self, flops: float) -> float:
        """Return the loss on WebText2, in nats per token of GPT-2: (3.1e8 / C)^0.050 for the least C in PF-days."""
        return math.pow(3.1e8 * PF_DAY_FLOPS / flops, 0.050)


KAPLAN = KaplanLaw()


@dataclass(frozen=True)
class LawRow:
    """Optimum of one law for a training budget."""

    name: str
    num_parameters: Interval | float
    """Parameters, as an interval if the law's errors are published."""
    tokens: Interval | float
    loss: Interval | float
    """Loss on the law's own text and tokenizer."""
    source: str


def law_rows(flops: float, own: ParametricLaw = BESIROGLU, expansion: float = 1.0) -> list[LawRow]:
    """Return the optima of the law that decides, the re-fit, the original exact and rounded, and Kaplan's law.

    For a model with experts also those of the joint law, without and with its `expansion`.
    """
    if expansion > 1:
        joint = [law_with_experts(ratio) for ratio in (1.0, expansion)]
    else:
        joint = []
    rows = [
        LawRow(
            law.name,
            law.estimate(lambda moved: moved.optimal_parameters(flops)),
            law.estimate(lambda moved: moved.optimal_tokens(flops)),
            law.estimate_loss(lambda moved: moved.optimal_loss(flops)),
            law.source,
        )
        for law in (*(LAWS if own in LAWS else (own, *LAWS)), *joint)
    ]
    size = KAPLAN.optimal_parameters(flops)
    tokens = KAPLAN.optimal_tokens(flops)
    loss = KAPLAN.optimal_loss(flops)
    return [*rows, LawRow(KAPLAN.name, size, tokens, loss, KAPLAN.source)]


def central(value: Interval | float) -> float:
    """Return a value without its range."""
    return value.value if isinstance(value, Interval) else value


# The best model for a goal.

GoalKind = Literal["flops", "parameters", "tokens", "loss"]


def optimal_point(
    law: ParametricLaw, kind: GoalKind, value: float, inference_tokens: float = 0.0, inference_weight: float = 1.0
) -> Point:
    """Return the optimal model with that many training FLOPs, parameters or tokens, or with that loss.

    It has the least 6 N D + w 2 N D_inference of all models of its loss (Sardana et al. 2024, arXiv:2401.00448), where
    alpha A / N^alpha = beta B / D^beta (1 + w D_inference / (3 D)); this gives one N for every D.
    `inference_weight` w: cost of a FLOP of inference in FLOPs of training (training MFU over inference MFU on the same
    GPUs). Raises ConfigError for a loss that no model has.
    """
    if kind == "loss":
        _check_loss(law, value)
    ln_a, ln_b, _, alpha, beta = law.coefficients

    def ln_parameters(ln_tokens: float) -> float:
        served = math.log1p(inference_weight * inference_tokens / 3 * math.exp(-ln_tokens))
        return (math.log(alpha) + ln_a - math.log(beta) - ln_b + beta * ln_tokens - served) / alpha

    def is_too_small(ln_tokens: float) -> bool:
        ln_n = ln_parameters(ln_tokens)
        if kind == "loss":
            return law.irreducible_loss + math.exp(ln_a - alpha * ln_n) + math.exp(ln_b - beta * ln_tokens) > value
        sizes = {"flops": math.log(6) + ln_n + ln_tokens, "parameters": ln_n, "tokens": ln_tokens}
        return sizes[kind] < math.log(value)

    # FLOPs, parameters and tokens all grow as the loss falls.
    low, high = _LN_TOKENS
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_small(middle) else (low, middle)
    parameters = math.exp(ln_parameters(low))
    tokens = math.exp(low)
    return Point(parameters, tokens, law.loss(parameters, tokens))


def _check_loss(law: ParametricLaw, loss: float) -> None:
    if loss <= law.irreducible_loss:
        raise ConfigError(
            f"a loss of {loss:g} nats per token cannot be reached: in the fit of {law.name}, no model gets below "
            f"{law.irreducible_loss:.2f}. Choose a higher loss."
        )
    if not loss < (highest := law.optimal_loss(1.0)):
        raise ConfigError(f"a loss of {loss:g} nats per token needs no training; choose one below {highest:.1f}.")


# From a size to a model that can be built.


def scaling_family(model: str | None) -> str:
    """Return the family whose depths and heads a model has at other sizes: its own if it has sizes, else GPT-3."""
    family = (model or "").rpartition("-")[0]
    return family if family in _OWN_SIZES else GPT3


def interpolated_shape(n_embd: int, like: GPTShape, family: str = GPT3) -> GPTShape:
    """Return the family's model of a width; vocabulary, context, dropout, norm and the rest are those of `like`.

    Depth: interpolated between the family's presets over the width, linearly in logarithms, and extrapolated below the
    narrowest; beyond the widest in proportion to the width, as in GPT-3's two largest (Brown et al. 2020, table 2.1).
    Heads: GPT-3's are of 64 up to a width of 2,048 and of 128 above, and its MLP keeps the ratio of `like`. In other
    families the width of all heads and of the MLP are interpolated like the depth.
    """
    if family != GPT3:
        return _shape_of_family(n_embd, like, family)
    head_dim = 64 if n_embd <= 2048 else 128
    presets = _presets(family, like.vocab_size, like.seq_len)
    depth = _interpolate(n_embd, {shape.n_embd: shape.n_layer for shape in presets})
    return like.changed({"n_layer": max(1, depth), "n_head": max(1, n_embd // head_dim), "n_embd": n_embd})


def _interpolate(n_embd: int, sizes: Mapping[int, int]) -> int:
    """Return a size at one width from the sizes at the widths of a family's presets."""
    points = sorted(sizes.items())
    widest, last = points[-1]
    if n_embd >= widest:
        return round(last * n_embd / widest)
    place = max(bisect.bisect_left([width for width, _ in points], n_embd), 1)
    (w0, s0), (w1, s1) = points[place - 1], points[place]
    return round(s0 * (s1 / s0) ** (math.log(n_embd / w0) / math.log(w1 / w0)))


def _shape_of_family(n_embd: int, like: GPTShape, family: str) -> GPTShape:
    presets = _presets(family, like.vocab_size, like.seq_len)
    nearest = min(presets, key=lambda shape: abs(math.log(shape.n_embd / n_embd)))
    head_dim = nearest.head_dim
    queries, keys, mlp_width, n_layer = (
        _interpolate(n_embd, {shape.n_embd: size(shape) for shape in presets}) for size in _SCALED
    )
    # Complete groups of query heads that share a key.
    n_kv_head = max(1, round(keys / head_dim))
    n_head = n_kv_head * max(1, round(queries / head_dim / n_kv_head))
    # A family's large models have an untied head; a choice that none of its presets of that width makes is the user's.
    if like.tied in {shape.tied for shape in presets if shape.n_embd == like.n_embd}:
        tied = nearest.tied
    else:
        tied = like.tied
    sizes = {"n_layer": max(1, n_layer), "n_embd": n_embd, "n_head": n_head, "n_kv_head": n_kv_head, "tied": tied}
    return like.changed({**sizes, "head_dim": head_dim, "mlp_width": max(64, round(mlp_width / 64) * 64)})


def _names(family: str) -> list[str]:
    return [name for name in PRESETS if name.rpartition("-")[0] == family]


@lru_cache(maxsize=16)
def _presets(family: str, vocab_size: int, seq_len: int) -> list[GPTShape]:
    """Return the family's shapes at a vocabulary and a context, by ascending width and depth."""
    shapes = [PRESETS[name].shape(vocab_size, seq_len) for name in _names(family)]
    return sorted(shapes, key=lambda shape: (shape.n_embd, shape.n_layer))


def preset_below(shape: GPTShape | None, family: str) -> str | None:
    """Return the family's largest preset with at most the parameters of `shape`, at its context and vocabulary."""
    if shape is None:
        return None
    names = _names(family) + (_names("gpt2") if family == GPT3 else [])
    sizes = {name: _preset_parameters(name, shape, family) for name in names}
    fitting = [name for name, size in sizes.items() if size <= shape.num_parameters]
    return max(fitting, key=lambda name: sizes[name], default=None)


def _preset_parameters(name: str, like: GPTShape, family: str) -> int:
    preset = PRESETS[name]
    if family != GPT3:
        return interpolated_shape(preset.n_embd, like, family).num_parameters
    sizes = {"n_layer": preset.n_layer, "n_head": preset.n_head, "n_embd": preset.n_embd}
    return like.changed(sizes).num_parameters


def nearest_preset(num_parameters: float, vocab_size: int) -> str:
    """Return the GPT-2 or GPT-3 preset of the nearest size by ratio."""

    def distance(name: str) -> float:
        return abs(math.log(PRESETS[name].shape(vocab_size).num_parameters / num_parameters))

    return min((name for name, preset in PRESETS.items() if not preset.block), key=distance)


def suggest_shape(num_parameters: float, vocab_size: int, seq_len: int) -> GPTShape:
    """Return a GPT of about that many parameters, shaped like GPT-3.

    Its depth is GPT-3's at a width, changed by the blocks that are missing or too many; of all widths it takes the one
    with the smallest change. Widths have an even number of heads, large ones a multiple of four; below one block of
    WIDTH_MULTIPLE they are those of a scaling ladder. Raises ConfigError when even the narrowest is too large.
    """
    like = GPTShape(1, 1, NARROW_WIDTHS[0], vocab_size, seq_len, "gelu_tanh")
    if num_parameters < like.num_parameters:
        raise ConfigError(
            f"{format_quantity(num_parameters)} parameters are fewer than the {like.num_parameters:,} of one block of "
            f"width {like.n_embd} and a vocabulary of {vocab_size:,}. Plan for more, or give a smaller --vocab-size."
        )
    if num_parameters < interpolated_shape(WIDTH_MULTIPLE, like).changed({"n_layer": 1}).num_parameters:
        return nearest_shape(num_parameters, like, NARROW_WIDTHS)
    return nearest_shape(num_parameters, like, _WIDTHS)


def nearest_shape(num_parameters: float, like: GPTShape, widths: Sequence[int] = NARROW_WIDTHS + _WIDTHS) -> GPTShape:
    """Return the GPT of one of the widths, otherwise like `like`, that is nearest in size and usual depth.

    Raises ConfigError for more parameters than the largest width has.
    """
    most = interpolated_shape(LARGEST_WIDTH, like).num_parameters
    if num_parameters > most:
        raise ConfigError(
            f"{format_quantity(num_parameters)} parameters are more than the largest shape here has "
            f"({format_quantity(most)}). Plan for less."
        )
    best = like
    least = math.inf
    for width in widths:
        usual = interpolated_shape(width, like)
        usual = replace(usual, n_layer=max(usual.n_layer, min(_LEAST_DEPTH, max(2, width // 16))))
        outside = replace(usual, n_layer=1).num_parameters - usual.block_parameters
        n_layer = max(1, round((num_parameters - outside) / usual.block_parameters))
        if n_layer > limits.MAX_LAYERS:
            continue
        shape = replace(usual, n_layer=n_layer)
        off = abs(math.log(shape.n_layer / usual.n_layer)) + abs(math.log(shape.num_parameters / num_parameters))
        if off < least:
            best = shape
            least = off
        if outside > num_parameters:
            break
    return best
