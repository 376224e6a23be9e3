"""The link `update` of any optimizer: its step beside that of a copy of it in fp64.

The copy has the same settings, states, weights and gradients, and steps one tensor after the other. So it judges what
the engine makes of the optimizer, and its arithmetic in fp32 or bf16; not whether the optimizer is a good one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llmscale.numerics.links import OF_STEP, UNIT, Finding, Watched, wrong_alone
from llmscale.numerics.probe import Piece, Probe

#: Bound of the states over their size.
_OF_STATES = 8 * UNIT
_LEAST = 1e-38
#: Optimizers that step every element by itself, so that some of a parameter's elements tell all.
_OF_ELEMENTS = {
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "DeepSpeedCPUAdam",
    "FusedAdam",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
}
#: DeepSpeed's own Adam computes by kernels for fp32 alone: the copy is torch's.
_KERNELS = ("DeepSpeedCPUAdam", "FusedAdam")
#: Settings of a group that choose torch's key through the same arithmetic.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


class OwnUpdate:
    """Compares the steps of an engine's optimizer with those of its copy."""

    def __init__(self, inner: torch.optim.Optimizer, strides: Mapping[str, int]) -> None:
        self._inner = inner
        self._is_sampled = any(stride > 1 for stride in strides.values())

    @property
    def refusal(self) -> str | None:
        """Return why this optimizer is not judged, in a sentence; None if it is."""
        name = type(self._inner).__name__
        if not self._is_sampled or name in _OF_ELEMENTS:
            return None
        return f"the update of {name} is not judged: the model is too large to copy all of it, and {name} needs all."

    def judge(self, step: int, watched: Watched, probe: Probe) -> list[Finding]:
        """Return the comparisons of one step. Collective."""
        numbers = self._compare(watched, probe)
        nothing = torch.zeros(4, dtype=torch.float64)
        rows = watched.gather(torch.stack([numbers.get(name, nothing) for name in watched.shapes]))
        error, value, moved = (watched.total(rows[..., column]).sqrt() for column in range(3))
        bounds = 2 * UNIT * value + OF_STEP * moved
        states = rows[..., 3]
        rank = wrong_alone(torch.maximum(rows[..., 0].sqrt() / bounds.clamp(min=_LEAST), states))
        findings = []
        for index, name in enumerate(watched.shapes):
            note = f"moved {float(moved[index]):.3g}"
            findings.append(Finding(step, "update", name, float(error[index]), float(bounds[index]), note, rank))
            worst = float(states[:, index].max())
            if worst > 1:
                findings.append(Finding(step, "update", name, worst, 1.0, "states of the optimizer", rank))
        return findings

    def _compare(self, watched: Watched, probe: Probe) -> dict[str, Tensor]:
        """Return (squared error, squares of value and step, share of the states' bound) of this rank's parts."""
        of_flat: dict[int, list[Piece]] = defaultdict(list)
        for piece in probe.pieces.values():
            if piece.before.numel():
                of_flat[id(piece.flat)].append(piece)
        numbers = {}
        for pieces in of_flat.values():
            after, states = self._step(pieces)
            sizes = [piece.before.numel() for piece in pieces]
            for number, (piece, expected) in enumerate(zip(pieces, after.split(sizes), strict=True)):
                own = {key: state.split(sizes)[number] for key, state in states.items()}
                numbers[piece.name] = _squares(watched, piece, expected, own)
        return numbers

    def _step(self, pieces: Sequence[Piece]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a flat tensor's parts after the copy's step, and its states with an element for each weight."""
        first = pieces[0]
        value = _join([piece.before for piece in pieces])
        size = value.numel()
        is_whole = size == first.flat.numel()
        parameter = torch.nn.Parameter(value.view(first.flat.shape) if is_whole else value)
        parameter.grad = _join([piece.given for piece in pieces]).view_as(parameter)
        copy = _copy(self._inner)
        copy.param_groups = [{**first.settings, **_plain_ways(first.settings), "params": [parameter]}]
        for key, state in first.states.items():
            if state.dim() and state.numel() == first.before.numel():
                copy.state[parameter][key] = _join([piece.states[key] for piece in pieces]).view_as(parameter)
            else:
                copy.state[parameter][key] = state.cpu().clone()
        type(copy).step(copy)
        states = {
            key: state.detach().view(-1)
            for key, state in copy.state[parameter].items()
            if isinstance(state, Tensor) and state.dim() and state.numel() == size
        }
        return parameter.detach().view(-1), states


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.to("cpu", torch.float64).reshape(-1) for part in parts])


def _copy(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind, without parameters, states, hooks, and what replaces its step."""
    kind: type[torch.optim.Optimizer] = type(inner)
    if kind.__name__ in _KERNELS:
        if getattr(inner, "adam_w_mode", True):
            kind = torch.optim.AdamW
        else:
            kind = torch.optim.Adam
        return kind([torch.nn.Parameter(torch.zeros(1))])
    copy = object.__new__(kind)
    attributes = {key: value for key, value in vars(inner).items() if key != "step"}
    hooks = {key: type(value)() for key, value in attributes.items() if key.endswith("_hooks")}
    vars(copy).update({**attributes, **hooks, "state": defaultdict(dict)})
    return copy


def _plain_ways(settings: Mapping[str, object]) -> dict[str, bool]:
    return {key: False for key in _WAYS if key in settings}


def _squares(watched: Watched, piece: Piece, expected: Tensor, states: Mapping[str, Tensor]) -> Tensor:
    after = piece.after.to("cpu", torch.float64).view(-1)
    before = piece.before.to("cpu", torch.float64).view(-1)
    error = watched.beyond_rounding(after, expected)
    worst = 0.0
    for key, state in states.items():
        left = piece.states_after[key].to("cpu", torch.float64).view(-1)
        beyond = float(watched.beyond_rounding(left, state).norm())
        size = float(state.norm())
        if key in piece.states:
            size += float(piece.states[key].double().norm())
        worst = max(worst, beyond / (_OF_STATES * size + _LEAST * state.numel() ** 0.5))
    squares = [error.square().sum(), expected.square().sum(), (expected - before).square().sum()]
    return torch.stack([*squares, torch.tensor(worst, dtype=torch.float64)])
