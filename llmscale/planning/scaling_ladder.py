"""The scaling ladder: runs of several sizes and token counts that a law is fitted to, and the file that lists them.

Every run has a learning-rate schedule of its own length. The file comes from anywhere: `load_ladder` checks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from llmscale.architecture.shape import GPTShape
from llmscale.config import limits
from llmscale.config.deepspeed.schema import show
from llmscale.config.user_paths import write_output_file
from llmscale.errors import ConfigError
from llmscale.planning.scaling import ParametricLaw, nearest_shape, training_flops
from llmscale.suggestions import describe_invalid
from llmscale.terminal.human_numbers import format_quantity
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import is_plain_name

LADDER_NAME, LAW_NAME = "ladder.json", "law.json"
CONFIGS_NAME, RUNS_NAME = "configs", "runs"
Design = Literal["isoflop", "horizons"]
#: Compute of a group over that of the one before it. Optimal sizes then differ by the step between sizes, so that the
#: same size is trained in several groups, each time with its own schedule.
GROUP_RATIO, SIZE_STEP = 4.0, 2.0
#: Compute of the held-out run over that of the largest group.
HELD_OUT_RATIO = 4.0
#: Token counts of a size in `horizons`, over the middle one: a range of 16 (Hoffmann et al. 2022, approach 1).
_HORIZONS = (0.25, 0.63, 1.59, 4.0)
_FEWEST_STEPS = 20
_MAX_RUNS = 1000
_MAX_BYTES = 1 << 20

#: Peak learning rate and tokens per step of a budget of C FLOPs, fitted between 1e17 and 2e19 FLOPs.
_RATE, _RATE_EXPONENT, _BATCH, _BATCH_EXPONENT = 0.3118, -0.1250, 0.2920, 0.3271
_SOURCE = "DeepSeek-AI 2024, arXiv:2401.02954, equation 1"
#: Compute below which that rule is an extrapolation.
LEAST_RULE_FLOPS = 1e17


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
    group: int = Field(ge=0, le=_MAX_RUNS)
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


class Ladder(_Strict):
    """A set of runs on one dataset."""

    version: Literal[1] = 1
    design: Design
    data: str = Field(min_length=1, max_length=4096)
    """Dataset as the user named it."""
    tokenizer: str = Field(max_length=200)
    rule: str = Field(max_length=400)
    """Source of learning rates and batch sizes."""
    runs: list[LadderRun] = Field(min_length=1, max_length=_MAX_RUNS)

    @field_validator("runs")
    @classmethod
    def _check_names(cls, runs: list[LadderRun]) -> list[LadderRun]:
        if len({run.name for run in runs}) < len(runs):
            raise ValueError("two runs have the same name")
        return runs


@dataclass(frozen=True)
class LadderRequest:
    """Inputs of a ladder."""

    flops: float
    """FLOPs of all runs together."""
    data: str
    tokenizer: str
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
    global_batch_size: int | None = None


def plan_ladder(request: LadderRequest) -> Ladder:
    """Choose sizes, tokens, batch and learning rate of every run, held-out runs last.

    Raises ConfigError if the budget is too small.
    """
    planned = list(_relative_runs(request))
    if request.has_held_out:
        most = HELD_OUT_RATIO * max(run.flops for run in planned)
        planned.append(_Relative(len({run.group for run in planned}), most, math.sqrt(most), is_held_out=True))
    # Every run's compute is a multiple of one unit, which follows from the total.
    unit = request.flops / sum(run.flops for run in planned)
    middle = math.sqrt(unit / (6 * request.tokens_per_parameter))
    runs: dict[str, LadderRun] = {}
    for run in planned:
        # The first run has the least compute.
        rate = _learning_rate(request.lr, unit * planned[0].flops, unit * run.flops)
        built = _build_run(request, run, unit * run.flops, middle * run.size, rate)
        # Two sizes can have the same nearest shape.
        runs.setdefault(built.name, built)
    return Ladder(
        design=request.design,
        data=request.data,
        tokenizer=request.tokenizer,
        rule=_describe_rule(request),
        runs=list(runs.values()),
    )


class _Relative(NamedTuple):
    """A run in units of the first group's middle one."""

    group: int
    flops: float
    size: float
    is_held_out: bool = False


def _relative_runs(request: LadderRequest) -> Iterator[_Relative]:
    """Yield the runs to fit: groups of equal compute, or of equal tokens per parameter."""
    sizes = [SIZE_STEP ** (index - (request.sizes - 1) / 2) for index in range(request.sizes)]
    if request.design == "isoflop":
        for group in range(request.groups):
            flops = GROUP_RATIO**group
            yield from (_Relative(group, flops, math.sqrt(flops) * size) for size in sizes)
    else:
        for group, horizon in enumerate(_HORIZONS):
            yield from (_Relative(group, horizon * size * size, size) for size in sizes)


def _learning_rate(given: float | None, least_flops: float, flops: float) -> float:
    """Return the peak learning rate for a budget, to four digits."""
    rate = given * (flops / least_flops) ** _RATE_EXPONENT if given else _RATE * flops**_RATE_EXPONENT
    return float(f"{rate:.4g}")


def _usual_batch_size(flops: float, seq_len: int) -> int:
    """Return the sequences per step for a budget: a power of two, which ranks can share."""
    return int(2 ** max(0, round(math.log2(_BATCH * flops**_BATCH_EXPONENT / seq_len))))


def _describe_rule(request: LadderRequest) -> str:
    rate = f"{request.lr:g} at the least compute, then falling as C^{_RATE_EXPONENT:g}" if request.lr else ""
    batch = f"{request.global_batch_size} sequences, as given" if request.global_batch_size else ""
    return (
        f"learning rate {rate or f'{_RATE} C^{_RATE_EXPONENT:g}'}; "
        f"batch {batch or f'{_BATCH} C^{_BATCH_EXPONENT} tokens'} ({_SOURCE})"
    )


def _build_run(request: LadderRequest, run: _Relative, flops: float, num_parameters: float, rate: float) -> LadderRun:
    shape = nearest_shape(num_parameters, request.like)
    batch = request.global_batch_size or _usual_batch_size(flops, shape.seq_len)
    steps = round(flops / (6 * shape.num_parameters) / (batch * shape.seq_len))
    if steps < _FEWEST_STEPS:
        raise ConfigError(
            f"a run of {format_quantity(shape.num_parameters)} parameters and {flops:.2g} FLOPs would have {steps} "
            f"steps; at least {_FEWEST_STEPS} are needed. Give a larger budget, fewer --sizes or a smaller batch."
        )
    kind = "held-out" if run.is_held_out else f"group{run.group}"
    return LadderRun(
        name=f"{kind}-{shape.num_parameters}",
        group=run.group,
        num_parameters=shape.num_parameters,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        steps=steps,
        tokens=steps * batch * shape.seq_len,
        global_batch_size=batch,
        lr=rate,
        is_held_out=run.is_held_out,
    )


def run_keys(run: LadderRun) -> dict[str, object]:
    """Return the keys of train.py that a ladder decides for a run.

    Validations at quarters of a run meet the ends of runs in the group below, whose schedules were shorter.
    """
    return {
        **{"n_layer": run.n_layer, "n_head": run.n_head, "n_embd": run.n_embd},
        **{"global_batch_size": run.global_batch_size, "steps": run.steps, "lr": run.lr},
        "warmup_steps": max(1, run.steps // 20),
        "val_every": max(1, run.steps // 8),
    }


Row = Annotated[list[Annotated[float, Field(ge=-1e9, le=1e9)]], Field(min_length=5, max_length=5)]
Exponent = Annotated[float, Field(ge=1e-3, le=10)]
LogTerm = Annotated[float, Field(ge=-700, le=700)]


class _LawFile(_Strict):
    """A law fitted to a ladder, for `plan --law`."""

    version: Literal[1] = 1
    name: Name
    source: str = Field(max_length=5000)
    coefficients: tuple[LogTerm, LogTerm, LogTerm, Exponent, Exponent] = Field(strict=False)
    """ln A, ln B, ln E, alpha, beta."""
    covariance: list[Row] = Field(min_length=5, max_length=5)
    fitted_parameters: tuple[Count, Count] = Field(strict=False)
    """Smallest and largest model of the fit."""


def save_law(path: Path, law: ParametricLaw) -> None:
    """Write a law for `plan --law`. Raises ConfigError."""
    small, large = law.fitted_parameters
    covariance = [list(row) for row in law.covariance or ()]
    found = {"version": 1, "name": law.name, "source": law.source, "coefficients": law.coefficients}
    values = {**found, "covariance": covariance, "fitted_parameters": (int(small), int(large))}
    write_output_file("law", path, json.dumps(values, indent=1) + "\n")


def load_ladder(folder: Path) -> Ladder:
    """Read a ladder's file. Raises ConfigError if it is missing or malformed."""
    remedy = "`llmscale ladder plan` writes it."
    return _load(Ladder, folder / LADDER_NAME, Rules(ConfigError, remedy, max_bytes=_MAX_BYTES))


def load_law(path: Path) -> ParametricLaw:
    """Read the law of `llmscale ladder fit`. Raises ConfigError if it is missing or malformed."""
    found = _load(_LawFile, path, Rules(ConfigError, "`llmscale ladder fit` writes it.", max_bytes=_MAX_BYTES))
    covariance = tuple(map(tuple, found.covariance))
    return ParametricLaw(found.name, found.coefficients, covariance, found.source, found.fitted_parameters)


_ModelT = TypeVar("_ModelT", bound=BaseModel)


def _load(kind: type[_ModelT], path: Path, rules: Rules) -> _ModelT:
    try:
        values = load_json(path, rules)
        return kind(**values)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path}: {error.strerror}. {rules.remedy}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}: {describe_invalid(where[:100], first, show)} {rules.remedy}") from None
