"""The link `update` of a run: the optimizer's step is that of a plain one in fp64 at the same weights and states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.engine.optimizers import newton_schulz_dtype
from llmscale.numerics.links import (
    DTYPES,
    OF_STEP,
    UNIT,
    EngineFacts,
    Finding,
    LinkJudge,
    PlainMean,
    Watched,
    wrong_alone,
)
from llmscale.numerics.plain import Rule, rule_of, step_adafactor, step_adamw, step_muon
from llmscale.numerics.probe import Piece, Probe

#: Bound of the update of Muon's matrices over the size of the step, by the type of its products.
_OF_MATRIX_STEP = {torch.float32: 2e-4, torch.bfloat16: 0.1}


def facts_of_run(resolved: ResolvedRun) -> EngineFacts:
    """Return the facts of a run's engine."""
    model = DTYPES[resolved.precision]
    data_types = resolved.ds_config.get("data_types", {})
    if isinstance(data_types, dict):
        sums = data_types.get("grad_accum_dtype")
    else:
        sums = None
    return EngineFacts(
        zero_stage=resolved.zero_stage,
        clipping=float(resolved.ds_config["gradient_clipping"]),  # type: ignore[arg-type]
        model=model,
        sums=DTYPES[str(sums)] if sums else model,
        sent=DTYPES[str(resolved.ds_config.get("communication_data_type") or "fp32")],
        master=torch.bfloat16 if resolved.ds.keys.has_bf16_states else torch.float32,
    )


@dataclass(frozen=True)
class WatchedRun(Watched):
    """Watched parameters of a run, whose optimizer's rules follow from its configuration."""

    config: RunConfig
    resolved: ResolvedRun
    is_whole: frozenset[str]
    """Parameters that are copied completely where their step needs that."""

    @cached_property
    def rules(self) -> dict[str, Rule]:
        return {name: rule_of(self.config, name, len(shape)) for name, shape in self.shapes.items()}


def watch_run(
    config: RunConfig,
    resolved: ResolvedRun,
    group: dist.ProcessGroup,
    strides: dict[str, int],
    is_whole: frozenset[str],
) -> WatchedRun:
    """Return the watched parameters of a run: all that are trained."""
    shapes = {tensor.name: tuple(tensor.parameter.shape) for tensor in resolved.tensors.trainable}
    return WatchedRun(facts_of_run(resolved), group, strides, shapes, config, resolved, is_whole)


class RunJudge(LinkJudge):
    """Judges one step after the other of a run, whose optimizer has a plain step of its own."""

    _watched: WatchedRun

    def __init__(self, watched: WatchedRun, probe: Probe, *, steps_counted: int | None) -> None:
        """steps_counted: optimizer steps so far; None to believe the engine."""
        super().__init__(watched, probe)
        self._count = steps_counted
        self._left: dict[str, tuple[float, ...]] = {}

    def judge(self, step: int, lr: float, reported: float | None, mean_of: Callable[[str], PlainMean]) -> list[Finding]:
        """Return the comparisons of one step that the optimizer has taken. Collective."""
        findings = [*self.judge_gradients(step, reported, mean_of), *self._update(step, lr)]
        if self._count is not None:
            self._count += 1
        return findings

    def _update(self, step: int, lr: float) -> list[Finding]:
        watched = self._watched
        numbers = []
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
        tolerances = [of_matrices if rule.kind == "muon" else OF_STEP for rule in watched.rules.values()]
        bounds = 2 * UNIT * value + torch.tensor(tolerances, dtype=torch.float64) * moved
        shares = torch.maximum(rows[..., 0].sqrt() / bounds, rows[..., 3])
        if watched.resolved.zero_stage:
            # One rank compares a complete parameter for all.
            shares[:, [rule.needs_all for rule in watched.rules.values()]] = 0.0
        rank = wrong_alone(shares)
        findings = []
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
        watched = self._watched
        shape = self._watched.shapes[name]
        nothing = torch.zeros(0)
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
                worst = max(worst, error / (OF_STEP * float(moment.norm()) + 1e-38))
        return _squares(after - expected, expected, expected - before, worst)


def _squares(error: Tensor, expected: Tensor, moved: Tensor, worst: float) -> Tensor:
    last = torch.tensor(worst, dtype=torch.float64)
    return torch.stack([error.square().sum(), expected.square().sum(), moved.square().sum(), last])
