"""The links of a step that need no second model: weights, reduction, norm and clipping, update.

Each link is judged by itself, with the bound that its own arithmetic explains. A comparison from end to end would not
do: AdamW turns the noise of a gradient that is zero into a step of full size, and hardly shows a gradient that is wrong
by a factor.

- weights: what the first forward pass computes with is the master weight, rounded, bit for bit, on every rank.
- reduce: the optimizer is given the mean of what autograd handed over on all ranks, times the factor of clipping. The
  bound is the rounding of the same reduction done plainly, in the run's types.
- norm: the reported norm, clipped, is the norm of what the optimizer is given.
- update: the optimizer's step is that of a plain one in fp64 at the same weights, gradients and states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.engine.optimizers import newton_schulz_dtype
from llmscale.numerics.plain import Rule, rule_of, step_adafactor, step_adamw, step_muon
from llmscale.numerics.probe import Piece, Probe

Link = Literal["weights", "loss", "gradient", "reduce", "norm", "update"]
LINKS: tuple[Link, ...] = ("weights", "loss", "gradient", "reduce", "norm", "update")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}
#: Unit roundoffs of fp32 and bf16.
UNIT, BF16_UNIT = 2.0**-24, 2.0**-8
#: Bound of `reduce` over the rounding of a plain reduction: of one parameter, and of all, whose errors average out.
_EACH, _TOGETHER = 2.0, 1.25
#: Bound of `norm`, relative, by the type of what the optimizer is given: fp32 holds the norm and the factor. In bf16
#: products with the factor are rounded, which is one-sided for factors near a power of two.
_NORM = {torch.float32: 1e-5, torch.bfloat16: BF16_UNIT}
#: Bound of `update` over the size of the step, beside the rounding of the value.
_OF_STEP = 3e-5
_OF_MATRIX_STEP = {torch.float32: 2e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    step: int
    """Steps before this one."""
    link: Link
    name: str
    """Parameter, or a word for all of them."""
    error: float
    bound: float
    note: str = ""
    rank: int | None = None
    """The rank that is wrong, if one alone is."""

    @property
    def share(self) -> float:
        """Return the error over its bound."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0

    @property
    def is_wrong(self) -> bool:
        return self.share > 1


def first_wrong(findings: Iterable[Finding]) -> Finding | None:
    """Return the first wrong comparison of the first wrong step: each link takes the one before as it is.

    Its rank is that of any comparison of the step.
    """
    wrong = [finding for finding in findings if finding.is_wrong]
    first = min(wrong, key=lambda finding: (finding.step, LINKS.index(finding.link)), default=None)
    if first is None:
        return None
    ranks = {finding.rank for finding in wrong if finding.step == first.step} - {None}
    return replace(first, rank=ranks.pop() if len(ranks) == 1 else None)


@dataclass(frozen=True)
class Watched:
    """Watched parameters and ranks. Sums over ranks go through gloo, not through the network that is checked."""

    config: RunConfig
    resolved: ResolvedRun
    group: dist.ProcessGroup
    strides: dict[str, int]
    is_whole: frozenset[str]
    """Parameters that are copied completely where their step needs that."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the complete shape of every trained parameter."""
        return {tensor.name: tuple(tensor.parameter.shape) for tensor in self.resolved.tensors.trainable}

    @cached_property
    def rules(self) -> dict[str, Rule]:
        return {name: rule_of(self.config, name, len(shape)) for name, shape in self.shapes.items()}

    @cached_property
    def master_dtype(self) -> torch.dtype:
        """Type of master weights, of their states, and of the gradients that the optimizer is given."""
        return torch.bfloat16 if self.resolved.ds.keys.has_bf16_states else torch.float32

    def beyond_rounding(self, values: Tensor, expected: Tensor) -> Tensor:
        """Return the errors of values that were rounded to the master's type, in bf16 without that rounding."""
        error = values - expected
        if self.master_dtype == torch.float32:
            return error
        return (error.abs() - BF16_UNIT * expected.abs()).clamp(min=0)

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def selected(self, name: str) -> int:
        """Return the number of a parameter's selected elements."""
        return -(-math.prod(self.shapes[name]) // self.strides[name])

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors. Collective."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def assemble(self, name: str, pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return rows of all selected elements from every rank's parts, each (first, part). Collective.

        At stage 0 every rank has all, and keeps its own.
        """
        rows = torch.zeros(len(pieces), self.selected(name), dtype=torch.float64)
        for row, (first, part) in zip(rows, pieces, strict=True):
            row[first : first + part.numel()] = part.to("cpu", torch.float64).view(-1)
        return rows if self.resolved.zero_stage == 0 else self.sum(rows)

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the ranks' numbers as rows. Collective."""
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(rows, numbers, group=self.group)
        return torch.stack(rows)

    def total(self, squares: Tensor) -> Tensor:
        """Return sums of squares over the parameters' parts, from the ranks' rows; at stage 0 the largest rank's."""
        return squares.amax(0) if self.resolved.zero_stage == 0 else squares.sum(0)


def wrong_alone(shares: Tensor) -> int | None:
    """Return the one rank that is beyond a bound, by shares of bounds [ranks, parameters]; None if several are."""
    wrong = (shares > 1).any(1).nonzero().view(-1).tolist()
    return wrong[0] if len(wrong) == 1 and len(shares) > 1 else None


class LinkJudge:
    """Judges one step after the other of a watched engine. Every rank calls it at the same steps."""

    def __init__(self, watched: Watched, probe: Probe, *, steps_counted: int | None) -> None:
        """steps_counted: optimizer steps so far; None to believe the engine."""
        self._watched, self._probe, self._count = watched, probe, steps_counted
        self._left: dict[str, tuple[float, ...]] = {}

    def judge(self, step: int, lr: float, reported: float | None, mean_of: Callable[[str], PlainMean]) -> list[Finding]:
        """Return the comparisons of one step that the optimizer has taken. Collective."""
        findings = [*self._weights(step), *self._gradients(step, reported, mean_of), *self._update(step, lr)]
        if self._count is not None:
            self._count += 1
        return findings

    def _weights(self, step: int) -> list[Finding]:
        watched, probe, wrong = self._watched, self._probe, []
        for name in watched.shapes:
            piece = probe.pieces.get(name)
            part = (0, torch.zeros(0)) if piece is None else (piece.first, piece.before)
            master = watched.assemble(name, [part])[0].float()
            used = probe.used[name].cpu()
            first = -(-probe.starts[name] // watched.strides[name])
            expected = master[first : first + used.numel()].to(used.dtype)
            wrong.append((used.double().view(-1) - expected.double()).abs().max() if used.numel() else torch.zeros(()))
        rows = watched.gather(torch.stack(wrong).double())
        rank = wrong_alone(rows * math.inf)
        return [
            Finding(step, "weights", name, float(column.max()), 0.0, rank=rank)
            for name, column in zip(watched.shapes, rows.T, strict=True)
        ]

    def _gradients(self, step: int, reported: float | None, mean_of: Callable[[str], PlainMean]) -> list[Finding]:
        watched, probe = self._watched, self._probe
        clip = float(watched.resolved.ds_config["gradient_clipping"])  # type: ignore[arg-type]
        given_norm = math.sqrt(float(watched.total(watched.gather(torch.tensor([probe.given_squares]).double()))[0]))
        norm = given_norm if reported is None else reported
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        findings, clipped = [], factor * norm
        if reported is not None:
            note = f"reported {norm:.6g}, clipped to {clipped:.6g}, given {given_norm:.6g}"
            allowed = _NORM[watched.master_dtype] * clipped
            findings.append(Finding(step, "norm", "all", abs(given_norm - clipped), allowed, note))
        numbers, roundings = [], []
        for name in watched.shapes:
            plain = mean_of(name)
            numbers.append(self._reduction(name, plain.mean, factor))
            explained = plain.explained(factor, watched.master_dtype)
            roundings.append((explained, plain.least, float(plain.mean.square().sum())))
        rows = watched.gather(torch.stack(numbers))  # [ranks, parameters, 3]
        of_parameters = watched.total(rows)
        error, product, square = (of_parameters[:, index] for index in range(3))
        each, least, size = (torch.tensor(column, dtype=torch.float64) for column in zip(*roundings, strict=True))
        total = float(size.sum())
        ratio = float(product.sum()) / (total * factor) if total and factor else 1.0
        note = f"all gradients x {ratio:.4g}" if abs(ratio - 1) > 1e-3 else ""
        slack = torch.zeros_like(size)
        if findings and findings[0].is_wrong and note:
            # A wrong common factor is the matter of `norm`; otherwise none is fitted, which would blur exact copies.
            scale = factor * ratio
            error = (square / scale**2 - 2 * product / scale + size).clamp(min=0)
            slack, note = 1e-6 * size, ""
        bounds = _EACH * each + least + slack.sqrt()
        rank = wrong_alone(rows[..., 0].sqrt() / bounds)
        for name, difference, bound in zip(watched.shapes, error.sqrt(), bounds, strict=True):
            findings.append(Finding(step, "reduce", name, float(difference), float(bound), note, rank))
        bound = _TOGETHER * float(each.norm()) + float(least.norm()) + math.sqrt(float(slack.sum()))
        findings.append(Finding(step, "reduce", "all", math.sqrt(float(error.sum())), bound, note))
        return findings

    def _reduction(self, name: str, mean: Tensor, factor: float) -> Tensor:
        """Return (squared error, product with the mean, square) of what this rank's optimizer is given."""
        piece = self._probe.pieces.get(name)
        if piece is None:
            return torch.zeros(3, dtype=torch.float64)
        given = piece.given.to("cpu", torch.float64)
        own = mean[piece.first : piece.first + given.numel()]
        error = (given / factor - own) if factor else given
        return torch.stack([error.square().sum(), (given * own).sum(), given.square().sum()])

    def _update(self, step: int, lr: float) -> list[Finding]:
        watched, numbers = self._watched, []
        for index, (name, rule) in enumerate(watched.rules.items()):
            piece = self._probe.pieces.get(name)
            if rule.needs_all and name not in watched.is_whole:
                numbers.append(torch.zeros(4, dtype=torch.float64))
            elif rule.needs_all:
                numbers.append(self._complete_update(index, name, rule, lr, piece))
            else:
                numbers.append(self._partial_update(name, rule, lr, piece))
        rows = watched.gather(torch.stack(numbers))
        error, value, moved = (watched.total(rows[..., column]).sqrt() for column in range(3))
        of_matrices = _OF_MATRIX_STEP[newton_schulz_dtype()]
        tolerances = [of_matrices if rule.kind == "muon" else _OF_STEP for rule in watched.rules.values()]
        bounds = 2 * UNIT * value + torch.tensor(tolerances, dtype=torch.float64) * moved
        shares = torch.maximum(rows[..., 0].sqrt() / bounds, rows[..., 3])
        if watched.resolved.zero_stage:
            # One rank compares a complete parameter for all.
            shares[:, [rule.needs_all for rule in watched.rules.values()]] = 0.0
        rank, findings = wrong_alone(shares), []
        for index, name in enumerate(watched.rules):
            note = f"moved {float(moved[index]):.3g}"
            findings.append(Finding(step, "update", name, float(error[index]), float(bounds[index]), note, rank))
            states = float(rows[:, index, 3].max())
            if states > 1:
                findings.append(Finding(step, "update", name, states, 1.0, "states of the optimizer", rank))
        return findings

    def _partial_update(self, name: str, rule: Rule, lr: float, piece: Piece | None) -> Tensor:
        """Return (squared error, squares of value and step, share of the states' bound) of this rank's part."""
        if piece is None or not piece.before.numel():
            return torch.zeros(4, dtype=torch.float64)
        before, given, after = (x.to("cpu", torch.float64) for x in (piece.before, piece.given, piece.after))
        zeros = torch.zeros_like(before)
        states = {key: piece.states.get(key, zeros).to("cpu", torch.float64) for key in ("exp_avg", "exp_avg_sq")}
        count = (piece.count if self._count is None else self._count) + 1
        expected, moments = step_adamw(self._watched.config, rule, lr, count, before, given, states)
        worst = self._compare_with_last(name, piece)
        for key, (moment, gradient) in {
            "exp_avg": (moments["exp_avg"], given),
            "exp_avg_sq": (moments["exp_avg_sq"], given.square()),
        }.items():
            left = piece.states_after[key].to("cpu", torch.float64)
            error = float(self._watched.beyond_rounding(left, moment).norm())
            bound = 8 * UNIT * float(states[key].norm() + gradient.norm()) + 1e-38 * math.sqrt(moment.numel())
            worst = max(worst, error / bound)
        beyond = self._watched.beyond_rounding(after, expected)
        return _squares(beyond, expected, expected - before, worst)

    def _compare_with_last(self, name: str, piece: Piece) -> float:
        """Return infinity if weights or states are not those that the last step left, else 0."""
        values = (piece.before, *piece.states.values())
        before = tuple(float(value.double().sum()) for value in values)
        last = self._left.get(name, before)
        self._left[name] = tuple(float(x.double().sum()) for x in (piece.after, *piece.states_after.values()))
        return 0.0 if before == last else math.inf

    def _complete_update(self, index: int, name: str, rule: Rule, lr: float, piece: Piece | None) -> Tensor:
        """Return the numbers of `_partial_update` of a parameter that one rank compares for all. Collective."""
        watched, shape, nothing = self._watched, self._watched.shapes[name], torch.zeros(0)
        parts = [nothing] * 4
        worst = 0.0
        if piece is not None:
            momentum = piece.states.get("momentum_buffer", torch.zeros_like(piece.before))
            parts = [piece.before, piece.given, piece.after, momentum]
            worst = self._compare_with_last(name, piece)
        first = 0 if piece is None else piece.first
        before, given, after, momentum = (
            row.view(shape) for row in watched.assemble(name, [(first, part) for part in parts])
        )
        is_owner = watched.resolved.zero_stage == 0 or index % watched.size == dist.get_rank(watched.group)
        if not is_owner:
            return torch.tensor([0.0, 0.0, 0.0, worst], dtype=torch.float64)
        if rule.kind == "muon":
            expected, _ = step_muon(watched.resolved.shape, name, rule, lr, before, given, momentum)
        else:
            assert piece is not None  # Adafactor steps complete parameters on every rank.
            states = {key: moment.to("cpu", torch.float64) for key, moment in piece.states.items()}
            count = (piece.count if self._count is None else self._count) + 1
            expected, moments = step_adafactor(rule, lr, count, before, given, states)
            for key, moment in moments.items():
                error = float((piece.states_after[key].cpu().double().view_as(moment) - moment).norm())
                worst = max(worst, error / (_OF_STEP * float(moment.norm()) + 1e-38))
        return _squares(after - expected, expected, expected - before, worst)


def _squares(error: Tensor, expected: Tensor, moved: Tensor, worst: float) -> Tensor:
    last = torch.tensor(worst, dtype=torch.float64)
    return torch.stack([error.square().sum(), expected.square().sum(), moved.square().sum(), last])


@dataclass(frozen=True)
class PlainMean:
    """A parameter's gradient, reduced plainly."""

    mean: Tensor
    """Mean over ranks of the sums over micro-batches, unscaled, in fp64."""
    own: Tensor
    """This rank's summand of the mean."""
    rounded: Tensor
    """Mean that a reduction in the run's types gives, unscaled, in fp64."""
    roundings: float
    """Times that its error counts: a sum over many ranks is rounded more than once."""
    least: float
    """Norm of the error that a reduction in fp32 may have."""

    def explained(self, factor: float, master: torch.dtype) -> float:
        """Return the norm of the rounding of what an optimizer with bf16 or fp32 masters is given, over `factor`."""
        given = self.rounded
        if master == torch.bfloat16 and factor:
            given = (given.to(master) * factor).double() / factor
        return self.roundings * float((given - self.mean).norm())


class MeanGradients:
    """Plain means of one step's gradients, a parameter at a time. Every rank asks in the same order."""

    def __init__(self, watched: Watched, probe: Probe) -> None:
        self._watched, self._probe = watched, probe
        resolved = watched.resolved
        model = DTYPES[resolved.precision]
        data_types = resolved.ds_config.get("data_types", {})
        sums = data_types.get("grad_accum_dtype") if isinstance(data_types, dict) else None
        self._model, self._sums = model, DTYPES[str(sums)] if sums else model
        self._sent = DTYPES[str(resolved.ds_config.get("communication_data_type") or "fp32")]

    def of(self, name: str) -> PlainMean:
        """Reduce the gradients of one parameter. Collective."""
        watched, size = self._watched, self._watched.size
        parts = [self._place(name, micro_batch.get(name)) for micro_batch in self._probe.gradients]
        exact = sum((part.double() for part in parts), torch.zeros(watched.selected(name), dtype=torch.float64))
        absolute = sum((part.double().abs() for part in parts), torch.zeros_like(exact))
        own = exact / (size * self._probe.scale)
        each_is_sent = watched.resolved.zero_stage >= 2
        if each_is_sent:
            near = [(part / size).to(self._sent).double() for part in parts]
        else:
            total = self._add(parts)
            total = total.to(self._model) if watched.resolved.zero_stage == 0 else total
            near = [(total / size).to(self._sent).double()]
        exact, absolute, *near = watched.sum(torch.stack([exact / size, absolute / size, *near]))
        near = [part.to(self._sent) for part in near]
        rounded = (self._add(near) if each_is_sent else near[0]).double()
        scale = self._probe.scale
        summands = max(8.0, math.sqrt(size * len(parts)))
        least = summands * UNIT * float(absolute.norm()) / scale
        return PlainMean(exact / scale, own, rounded / scale, math.sqrt(max(1, size - 1)), least)

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        """Add micro-batches one after the other, as the engine does."""
        total = parts[0].to(self._sums)
        for part in parts[1:]:
            total = total + part.to(self._sums)
        return total

    def _place(self, name: str, part: Tensor | None) -> Tensor:
        """Return this rank's part of a parameter, which may be some of its experts, among zeros."""
        count = self._watched.selected(name)
        if part is None:
            return torch.zeros(count, dtype=self._model)
        row = torch.zeros(count, dtype=part.dtype)
        first = -(-self._probe.starts[name] // self._watched.strides[name])
        row[first : first + part.numel()] = part.cpu().view(-1)
        return row
