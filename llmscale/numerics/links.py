"""The links of a step that need no second model: weights, reduction, norm and clipping.

Each link is judged by itself, with the bound that its own arithmetic explains. A comparison from end to end would not
do: AdamW turns the noise of a gradient that is zero into a step of full size, and hardly shows a gradient that is wrong
by a factor.

- weights: what the first forward pass computes with is the master weight, rounded, bit for bit, on every rank.
- reduce: the optimizer is given the mean of what autograd handed over on all ranks, times the factor of clipping. The
  bound is the rounding of the same reduction done plainly, in the run's types.
- norm: the reported norm, clipped, is the norm of what the optimizer is given.

The link after them, the optimizer's update, is judged in run_update.py or own_update.py.
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

from llmscale.numerics.probe import Probe

Link = Literal["weights", "loss", "gradient", "reduce", "norm", "update"]
LINKS: tuple[Link, ...] = ("weights", "loss", "gradient", "reduce", "norm", "update")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}
#: Unit roundoffs of fp32 and bf16.
UNIT = 2.0**-24
BF16_UNIT = 2.0**-8
#: Bound of `reduce` over the rounding of a plain reduction: of one parameter, and of all, whose errors average out.
_EACH = 2.0
_TOGETHER = 1.25
#: Bound of `norm`, relative, by the type of what the optimizer is given: fp32 holds the norm and the factor. In bf16
#: products with the factor are rounded, which is one-sided for factors near a power of two.
_NORM = {torch.float32: 1e-5, torch.bfloat16: BF16_UNIT}
#: Bound of `update` over the size of the step, beside the rounding of the value.
OF_STEP = 3e-5


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
        if self.bound:
            return self.error / self.bound
        if self.error:
            return math.inf
        return 0.0

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
class EngineFacts:
    """Settings of an engine from which the arithmetic of its steps follows."""

    zero_stage: int
    clipping: float
    """Largest norm of the gradients; 0 without clipping."""
    model: torch.dtype
    """Type of the weights that compute."""
    sums: torch.dtype
    """Type in which gradients of micro-batches are summed."""
    sent: torch.dtype
    """Type in which ranks exchange gradients."""
    master: torch.dtype
    """Type of master weights, of their states, and of the gradients that the optimizer is given."""


@dataclass(frozen=True)
class Watched:
    """Watched parameters and ranks. Sums over ranks go through gloo, not through the network that is checked."""

    facts: EngineFacts
    group: dist.ProcessGroup
    strides: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    """Complete shape of every trained parameter."""

    def beyond_rounding(self, values: Tensor, expected: Tensor) -> Tensor:
        """Return the errors of values that were rounded to the master's type, in bf16 without that rounding."""
        error = values - expected
        if self.facts.master == torch.float32:
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
        if self.facts.zero_stage == 0:
            return rows
        return self.sum(rows)

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the ranks' numbers as rows. Collective."""
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(rows, numbers, group=self.group)
        return torch.stack(rows)

    def total(self, squares: Tensor) -> Tensor:
        """Return sums of squares over the parameters' parts, from the ranks' rows; at stage 0 the largest rank's."""
        if self.facts.zero_stage == 0:
            return squares.amax(0)
        return squares.sum(0)


def wrong_alone(shares: Tensor) -> int | None:
    """Return the one rank that is beyond a bound, by shares of bounds [ranks, parameters]; None if several are."""
    wrong = (shares > 1).any(1).nonzero().view(-1).tolist()
    return wrong[0] if len(wrong) == 1 and len(shares) > 1 else None


class LinkJudge:
    """Judges the links of one step after the other, except the update. Every rank calls it at the same steps."""

    def __init__(self, watched: Watched, probe: Probe) -> None:
        self._watched = watched
        self._probe = probe

    def judge_gradients(self, step: int, reported: float | None, mean_of: Callable[[str], PlainMean]) -> list[Finding]:
        """Return the comparisons of one step's weights, reduction and norm. Collective."""
        return [*self._weights(step), *self._gradients(step, reported, mean_of)]

    def _weights(self, step: int) -> list[Finding]:
        watched = self._watched
        probe = self._probe
        wrong = []
        for name in watched.shapes:
            piece = probe.pieces.get(name)
            if piece is None:
                part = (0, torch.zeros(0))
            else:
                part = (piece.first, piece.before)
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
        watched = self._watched
        probe = self._probe
        clip = watched.facts.clipping
        given_norm = math.sqrt(float(watched.total(watched.gather(torch.tensor([probe.given_squares]).double()))[0]))
        norm = given_norm if reported is None else reported
        if clip:
            factor = min(1.0, clip / (norm + 1e-6))
        else:
            factor = 1.0
        findings = []
        clipped = factor * norm
        if reported is not None:
            note = f"reported {norm:.6g}, clipped to {clipped:.6g}, given {given_norm:.6g}"
            allowed = _NORM[watched.facts.master] * clipped
            findings.append(Finding(step, "norm", "all", abs(given_norm - clipped), allowed, note))
        numbers = []
        roundings = []
        for name in watched.shapes:
            plain = mean_of(name)
            numbers.append(self._reduction(name, plain.mean, factor))
            explained = plain.explained(factor, watched.facts.master)
            roundings.append((explained, plain.least, float(plain.mean.square().sum())))
        rows = watched.gather(torch.stack(numbers))  # [ranks, parameters, 3]
        of_parameters = watched.total(rows)
        error, product, square = (of_parameters[:, index] for index in range(3))
        each, least, size = (torch.tensor(column, dtype=torch.float64) for column in zip(*roundings, strict=True))
        total = float(size.sum())
        if total and factor:
            ratio = float(product.sum()) / (total * factor)
        else:
            ratio = 1.0
        note = f"all gradients x {ratio:.4g}" if abs(ratio - 1) > 1e-3 else ""
        slack = torch.zeros_like(size)
        if findings and findings[0].is_wrong and note:
            # A wrong common factor is the matter of `norm`; otherwise none is fitted, which would blur exact copies.
            scale = factor * ratio
            error = (square / scale**2 - 2 * product / scale + size).clamp(min=0)
            slack = 1e-6 * size
            note = ""
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
        self._watched = watched
        self._probe = probe

    def of(self, name: str) -> PlainMean:
        """Reduce the gradients of one parameter. Collective."""
        watched = self._watched
        size = self._watched.size
        parts = [self._place(name, micro_batch.get(name)) for micro_batch in self._probe.gradients]
        exact = sum((part.double() for part in parts), torch.zeros(watched.selected(name), dtype=torch.float64))
        absolute = sum((part.double().abs() for part in parts), torch.zeros_like(exact))
        own = exact / (size * self._probe.scale)
        each_is_sent = watched.facts.zero_stage >= 2
        if each_is_sent:
            near = [(part / size).to(watched.facts.sent).double() for part in parts]
        else:
            total = self._add(parts)
            if watched.facts.zero_stage == 0:
                total = total.to(watched.facts.model)
            near = [(total / size).to(watched.facts.sent).double()]
        exact, absolute, *near = watched.sum(torch.stack([exact / size, absolute / size, *near]))
        near = [part.to(watched.facts.sent) for part in near]
        rounded = (self._add(near) if each_is_sent else near[0]).double()
        scale = self._probe.scale
        summands = max(8.0, math.sqrt(size * len(parts)))
        least = summands * UNIT * float(absolute.norm()) / scale
        return PlainMean(exact / scale, own, rounded / scale, math.sqrt(max(1, size - 1)), least)

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        """Add micro-batches one after the other, as the engine does."""
        sums = self._watched.facts.sums
        total = parts[0].to(sums)
        for part in parts[1:]:
            total = total + part.to(sums)
        return total

    def _place(self, name: str, part: Tensor | None) -> Tensor:
        """Return this rank's part of a parameter, which may be some of its experts, among zeros."""
        count = self._watched.selected(name)
        if part is None:
            return torch.zeros(count, dtype=self._watched.facts.model)
        row = torch.zeros(count, dtype=part.dtype)
        first = -(-self._probe.starts[name] // self._watched.strides[name])
        row[first : first + part.numel()] = part.cpu().view(-1)
        return row
