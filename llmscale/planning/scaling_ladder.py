"""The scaling ladder: runs of several sizes and token counts that a law is fitted to, and the files that list them.

Every run has a learning-rate schedule of its own length. Files of ladders and laws are not trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from llmscale import limits
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import show
from llmscale.config.user_paths import write_output_file
from llmscale.errors import ConfigError
from llmscale.files.atomic_write import write_durably
from llmscale.planning.scaling import (
    EXPONENTS,
    LARGEST,
    LEAST_IRREDUCIBLE_LOSS,
    ParametricLaw,
    nearest_shape,
    training_flops,
)
from llmscale.suggestions import describe_invalid
from llmscale.terminal.human_numbers import format_quantity
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json
from llmscale.untrusted.paths import is_plain_name
from llmscale.untrusted.terminal import is_visible, make_visible_line

LADDER_NAME = "ladder.json"
LAW_NAME = "law.json"
CONFIGS_NAME = "configs"
RUNS_NAME = "runs"
Design = Literal["isoflop", "horizons", "rates"]
#: Ratios of compute of neighbouring groups, and of sizes within a group. A size then returns in the next group, with
#: four times the tokens and its own schedule.
_GROUP_RATIO = 4.0
_SIZE_RATIO = 2.0
#: Learning rates of a sweep without its own, over that of the rule: below 1e17 FLOPs the rule's are too high.
_SWEPT = (1 / 8, 1 / 4, 1 / 2, 1, 2)
#: Compute of the held-out run over that of the largest other.
HELD_OUT_RATIO = 4.0
#: Token counts of a size in `horizons`, over the middle one: a range of 16 (Hoffmann et al. 2022, approach 1).
_HORIZONS = (0.25, 0.63, 1.59, 4.0)
_FEWEST_STEPS = 20
#: Peak learning rate and tokens per step of a run of C FLOPs (DeepSeek-AI 2024, arXiv:2401.02954, equation 1), and the
#: least compute that they were fitted to.
_RATE = 0.3118
_RATE_EXPONENT = -0.1250
_BATCH = 0.2920
_BATCH_EXPONENT = 0.3271
LEAST_RULE_FLOPS = 1e17
#: Runs that a ladder is planned with at least. Of six, the intervals of planted laws held 55 to 62 %.
FEWEST_RUNS = 8
#: Number of resamples of a law, which its file holds.
LEAST_RESAMPLES = 50
MOST_RESAMPLES = 2_000
#: Longest name of a law.
_LONGEST_NAME = 255
#: Compute at which a law must have an optimum.
_ANY_FLOPS = (1e6, 1e36)
#: Share of a bound within which a fitted number counts as at it.
_AT_BOUND = 0.01
_MOST_DECADES = 10
#: Chinchilla's, with which the compute of the largest model is that of a next group.
_TOKENS_PER_PARAMETER = 20


def _check_name(name: str) -> str:
    if not is_plain_name(name) or name.startswith("."):
        raise ValueError("must be a plain name")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Count = Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LadderRun(_Strict):
    """One run of a ladder."""

    name: Name
    """Name of its run file and of its run folder."""
    group: int = Field(ge=0, le=1000)
    """Group of equal compute, or of equal tokens per parameter, from 0."""
    num_parameters: Count
    """Parameters, embeddings included."""
    n_layer: int = Field(ge=1, le=limits.MAX_LAYERS)
    n_head: int = Field(ge=1, le=limits.MAX_HEADS)
    n_embd: int = Field(ge=1, le=limits.MAX_WIDTH)
    steps: int = Field(ge=1, le=limits.MAX_STEPS)
    tokens: Count
    """Training tokens."""
    global_batch_size: int = Field(ge=1, le=limits.MAX_BATCH)
    lr: float = Field(gt=0, le=limits.MAX_LEARNING_RATE)
    """Peak learning rate."""
    is_held_out: bool = False
    """Not fitted: its loss is predicted."""

    @property
    def flops(self) -> float:
        """Training FLOPs, 6 N D."""
        return training_flops(self.num_parameters, self.tokens)


def _check_runs(runs: list[LadderRun]) -> list[LadderRun]:
    if len({run.name for run in runs}) < len(runs):
        raise ValueError("two runs have the same name")
    return runs


class Ladder(_Strict):
    """A set of runs on one dataset."""

    version: Literal[1] = 1
    design: Design
    data: str = Field(min_length=1, max_length=4096)
    """Dataset, as an absolute path or a URL."""
    tokenizer: str = Field(max_length=200)
    vocab_size: int = Field(ge=1, le=limits.MAX_VOCAB)
    seq_len: int = Field(ge=1, le=limits.MAX_SEQ_LEN)
    rule: str = Field(max_length=400)
    """Source of learning rates and batch sizes."""
    runs: Annotated[list[LadderRun], Field(min_length=1, max_length=1000), AfterValidator(_check_runs)]


@dataclass(frozen=True)
class LadderRequest:
    """Inputs of a ladder."""

    flops: float
    """FLOPs of all runs together."""
    like: GPTShape
    """Model whose block, vocabulary and context all sizes have."""
    design: Design = "isoflop"
    groups: int = 3
    sizes: int = 5
    tokens_per_parameter: float = 20.0
    """Tokens per parameter of each group's middle size."""
    has_held_out: bool = True
    lr: float | None = None
    """Learning rate of the least compute, from which the others follow; None for the rule."""
    rate_factor: float = 1.0
    """Ratio of the optimizer's learning rate to the rule's, which is AdamW's."""


def rate_at(rate: float, flops: float, next_flops: float) -> float:
    """Return the best learning rate at other compute from that at `flops`: lr* ~ C^-0.125 (DeepSeek-AI 2024).

    With as many tokens per parameter that is N^-0.25.
    """
    return rate * math.pow(next_flops / flops, _RATE_EXPONENT)


class _Relative(NamedTuple):
    """A run in units of the compute and the size of the first group's middle run."""

    group: int
    flops: float
    size: float
    is_held_out: bool = False


def plan_ladder(request: LadderRequest, data: str, tokenizer: str) -> Ladder:
    """Choose sizes, tokens, batch and learning rate of every run.

    Raises ConfigError if the budget is too small or too large.
    """
    if request.like.num_experts:
        raise ConfigError(
            f"num_experts is {request.like.num_experts}, but a ladder's law counts dense models: leave num_experts out"
        )
    planned = list(_relative_runs(request))
    if request.has_held_out:
        most = HELD_OUT_RATIO * max(run.flops for run in planned)
        planned.append(_Relative(len({run.group for run in planned}), most, math.sqrt(most), is_held_out=True))
    unit = request.flops / sum(run.flops for run in planned)
    middle = math.sqrt(unit / (6 * request.tokens_per_parameter))
    # The rule's constant depends on model and text; its exponent is used with another one, too.
    least = unit * min(run.flops for run in planned)
    if request.lr:
        factor = request.lr / least**_RATE_EXPONENT
        rate = f"{request.lr:g} at the least compute, falling as"
    else:
        factor = _RATE * request.rate_factor
        rate = f"{factor:g}"
    runs = [
        _build_run(run, unit * run.flops, nearest_shape(middle * run.size, request.like), factor) for run in planned
    ]
    return Ladder(
        design=request.design,
        data=data,
        tokenizer=tokenizer,
        vocab_size=request.like.vocab_size,
        seq_len=request.like.seq_len,
        rule=f"learning rate {rate} C^{_RATE_EXPONENT:g}, batch {_BATCH} C^{_BATCH_EXPONENT} tokens (DeepSeek-AI 2024)",
        runs=_check_can_be_fitted(runs),
    )


def plan_sweep(request: LadderRequest, rates: Sequence[float], data: str, tokenizer: str) -> Ladder:
    """Plan runs of one size and `request.flops` each that differ in their learning rate alone; no rates: the usual.

    Raises ConfigError if the compute is too small or too large.
    """
    shape = nearest_shape(math.sqrt(request.flops / (6 * request.tokens_per_parameter)), request.like)
    run = _build_run(_Relative(0, 1.0, 1.0), request.flops, shape, _RATE * request.rate_factor)
    usual = request.lr or run.lr
    return Ladder(
        design="rates",
        data=data,
        tokenizer=tokenizer,
        vocab_size=request.like.vocab_size,
        seq_len=request.like.seq_len,
        rule="learning rates of a sweep",
        runs=_runs_at_rates(run, rates or [usual * factor for factor in _SWEPT]),
    )


def add_rates(ladder: Ladder, rates: Sequence[float]) -> Ladder:
    """Return a sweep with the runs of further rates."""
    runs = {run.name: run for run in (*ladder.runs, *_runs_at_rates(ladder.runs[0], rates))}
    return ladder.model_copy(update={"runs": sorted(runs.values(), key=lambda run: run.lr)})


def is_same_sweep(one: Ladder, other: Ladder) -> bool:
    """Return whether two sweeps differ in their rates alone."""
    rates = [run.lr for run in (*one.runs, *other.runs)]
    return add_rates(one, rates) == add_rates(other, rates)


def _runs_at_rates(run: LadderRun, rates: Sequence[float]) -> list[LadderRun]:
    names = {f"lr-{rate:.3g}": float(f"{rate:.3g}") for rate in sorted(rates)}
    return [run.model_copy(update={"name": name, "lr": rate}) for name, rate in names.items()]


def _check_can_be_fitted(runs: Sequence[LadderRun]) -> list[LadderRun]:
    """Return the different runs. Raises ConfigError if they are too few for a law of five numbers."""
    # Two sizes can have the same nearest shape.
    different = list({run.name: run for run in runs}.values())
    count = sum(not run.is_held_out for run in different)
    if count < FEWEST_RUNS:
        raise ConfigError(
            f"{count} different runs do not determine a law of five numbers: {FEWEST_RUNS} do, and the default has 15. "
            "Give more --sizes or --groups, and a larger budget if sizes coincide."
        )
    return different


def _relative_runs(request: LadderRequest) -> Iterator[_Relative]:
    """Yield the runs to fit: groups of equal compute, or of equal tokens per parameter."""
    sizes = [_SIZE_RATIO ** (index - (request.sizes - 1) / 2) for index in range(request.sizes)]
    if request.design == "isoflop":
        for group in range(request.groups):
            flops = _GROUP_RATIO**group
            yield from (_Relative(group, flops, math.sqrt(flops) * size) for size in sizes)
    else:
        for group, horizon in enumerate(_HORIZONS):
            yield from (_Relative(group, horizon * size * size, size) for size in sizes)


def _build_run(run: _Relative, flops: float, shape: GPTShape, rate_factor: float) -> LadderRun:
    # A power of two, which ranks can share.
    batch = int(2 ** max(0, round(math.log2(_BATCH * flops**_BATCH_EXPONENT / shape.seq_len))))
    steps = round(flops / (6 * shape.num_parameters) / (batch * shape.seq_len))
    if steps < _FEWEST_STEPS:
        raise ConfigError(
            f"a run of {format_quantity(shape.num_parameters)} parameters and {flops:.2g} FLOPs would have {steps} "
            f"steps; at least {_FEWEST_STEPS} are needed. Give a larger budget, or more --tokens-per-parameter."
        )
    try:
        return LadderRun(
            name=f"{'held-out' if run.is_held_out else f'group{run.group}'}-{shape.num_parameters}",
            group=run.group,
            num_parameters=shape.num_parameters,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            steps=steps,
            tokens=steps * batch * shape.seq_len,
            global_batch_size=batch,
            lr=float(f"{rate_factor * flops**_RATE_EXPONENT:.4g}"),
            is_held_out=run.is_held_out,
        )
    except ValidationError as error:
        first = error.errors()[0]
        why = describe_invalid(str(first["loc"][0]), first, show)
        raise ConfigError(f"a run of {flops:.2g} FLOPs is too large: {why} Give a smaller budget.") from None


def save_ladder(folder: Path, ladder: Ladder, keys: Mapping[str, object]) -> None:
    """Write a run file for each run, with `keys` of train.py for all, and the ladder last. Raises ConfigError."""
    import yaml

    usual = {"save_every_minutes": 10.0, "keep_last": 1}
    try:
        for name in (CONFIGS_NAME, RUNS_NAME):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for run in ladder.runs:
            own = {
                key: getattr(run, key) for key in ("n_layer", "n_head", "n_embd", "global_batch_size", "steps", "lr")
            }
            # Validations at quarters of a run meet the ends of runs in the group before.
            own |= {"warmup_steps": max(1, run.steps // 20), "val_every": max(1, run.steps // 8)}
            path = folder / CONFIGS_NAME / f"{run.name}.yaml"
            text = yaml.safe_dump({**usual, **keys, "data": ladder.data, **own}, sort_keys=False)
            if path.exists() and path.read_text() != text:
                raise ConfigError(f"{path} has other keys: --config was another one. Name a new folder.")
            write_durably(path, text)
        write_durably(folder / LADDER_NAME, ladder.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror or error}. Name another.") from None


def load_ladder(folder: Path) -> Ladder:
    """Read a ladder's file. Raises ConfigError if it is missing or malformed."""
    return _load(Ladder, folder / LADDER_NAME, "`llmscale ladder plan` writes it.")


def _check_line(name: str) -> str:
    if not is_visible(name):
        raise ValueError("must be one line without control characters")
    return name


_Term = Annotated[float, Field(ge=-700, le=700)]
_LnLoss = Annotated[float, Field(ge=-7, le=10)]
_Exponent = Annotated[float, Field(ge=1e-3, le=10)]
_Row = Annotated[tuple[_Term, _Term, _LnLoss, _Exponent, _Exponent], Field(strict=False)]


class _LawFile(_Strict):
    """A law fitted to a ladder."""

    version: Literal[2] = 2
    name: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), AfterValidator(_check_line)]
    source: str = Field(max_length=5000)
    coefficients: _Row
    """ln A, ln B, ln E, alpha, beta."""
    loss_error: float = Field(ge=0, le=10)
    fitted_parameters: tuple[Count, Count] = Field(strict=False)
    """Smallest and largest model of the fit."""
    resamples: Annotated[list[_Row], Field(min_length=LEAST_RESAMPLES, max_length=MOST_RESAMPLES)]
    """Coefficients of the resamples."""


def save_law(path: Path, law: ParametricLaw) -> None:
    """Write a law for `plan --law`. Raises ConfigError."""
    values = {
        "version": 2,
        "name": make_visible_line(law.name)[:_LONGEST_NAME],
        "source": law.source,
        "coefficients": law.coefficients,
        "loss_error": law.loss_error,
        "fitted_parameters": [int(size) for size in law.fitted_parameters],
    }
    rows = ",\n".join(json.dumps([float(f"{value:.9g}") for value in row]) for row in law.resamples)
    text = json.dumps(values, indent=1, allow_nan=False).removesuffix("\n}")
    write_output_file("law", path, f'{text},\n "resamples": [\n{rows}\n ]\n}}\n')


def load_law(path: Path) -> ParametricLaw:
    """Read the law of `llmscale ladder fit`. Raises ConfigError if it is missing or malformed."""
    content = _load(_LawFile, path, "`llmscale ladder fit` writes it.")
    law = ParametricLaw(
        content.name,
        content.coefficients,
        None,
        content.source,
        content.fitted_parameters,
        tuple(content.resamples),
        content.loss_error,
    )
    if why := doubts(law):
        raise ConfigError(f"{path}: the runs do not determine this law: {'; '.join(why)}. Fit it to more runs.")
    return law


def doubts(law: ParametricLaw) -> list[str]:
    """Return why runs do not determine a law: a number at its bound, no finite optimum, or one known within decades.

    A law that has any of these is reported by `ladder fit` and refused by `plan`.
    """
    _, _, ln_e, alpha, beta = law.coefficients
    numbers = [("alpha", alpha, bound) for bound in EXPONENTS] + [("beta", beta, bound) for bound in EXPONENTS]
    numbers.append(("E", math.exp(ln_e), LEAST_IRREDUCIBLE_LOSS))
    at_bounds = [
        f"{name} is at its bound, {bound:g}" for name, value, bound in numbers if abs(value / bound - 1) < _AT_BOUND
    ]
    optima = (ParametricLaw.optimal_parameters, ParametricLaw.optimal_tokens, ParametricLaw.optimal_loss)
    intervals = [law.interval(partial(quantity, flops=flops)) for quantity in optima for flops in _ANY_FLOPS]
    if not all(interval and max(interval.value, interval.high) < LARGEST for interval in intervals):
        return [*at_bounds, "it has no finite optimum"]
    largest = law.fitted_parameters[1]
    flops = training_flops(largest, _TOKENS_PER_PARAMETER * largest)
    return at_bounds + [
        f"the best {name} for {flops:.2g} FLOPs is known as {interval.low:.1g} to {interval.high:.1g}"
        for name, quantity in (("size", ParametricLaw.optimal_parameters), ("data", ParametricLaw.optimal_tokens))
        if (interval := law.interval(partial(quantity, flops=flops)))
        and interval.high > 10.0**_MOST_DECADES * interval.low
    ]


_ModelT = TypeVar("_ModelT", bound=BaseModel)


def _load(kind: type[_ModelT], path: Path, remedy: str) -> _ModelT:
    try:
        return kind(**load_json(path, Rules(ConfigError, remedy, max_bytes=CONFIG_MAX_BYTES)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path}: {error.strerror}. {remedy}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise ConfigError(f"{path}: {describe_invalid(where, first, show)} {remedy}") from None
