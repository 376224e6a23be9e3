"""Routers of experts at logged steps: their metrics, each expert's load, and a warning of one that has collapsed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from llmscale.model.experts import BALANCE, ENTROPY, MOVED, Z_SQUARED
from llmscale.training.live_run import Engine, Run, RunIO

#: A router has collapsed when an expert is unused, or gets nearly all tokens, for this number of steps and of readings.
PATIENCE_STEPS, MIN_READINGS, NEARLY_ALL = 100, 5, 0.95
#: Loads relative to the mean: an expert is unused below the first; one with nearly all tokens has at least the second.
_UNUSED, _OVERLOADED = 1e-3, 1.5
#: Tokens per expert and step below which an expert may have none by chance.
_MIN_TOKENS = 10
#: Factor between the steps whose loads are recorded expert by expert: a table may have 10,000 numbers.
_TABLE_GROWTH = 1.25
#: Experts and blocks that a warning names.
_MAX_NAMES = 4


class RouterLog:
    """Reads `GPT.routing` at logged steps."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
        shape = run.resolved.shape
        self._blocks = [block for block in range(shape.n_layer) if shape.is_sparse(block)]
        self._detector = CollapseDetector(len(self._blocks), shape.num_experts)
        self._next_table = 0.0

    def read(self, step: int) -> dict[str, Any]:
        """Return the routers' fields of StepMetrics on rank 0; none without experts. Collective."""
        routing = self._engine.deepspeed.module.routing
        if routing is None:
            return {}
        routing = routing.clone()
        dist.all_reduce(routing)
        if self._io.log is None:
            return {}
        shape, loss = self._run.resolved.shape, self._run.resolved.loss
        sums = routing.double().cpu().numpy()
        loads, tokens = sums[:, : shape.num_experts], sums[0, : shape.num_experts].sum() / shape.experts_per_token
        relative = loads / loads.mean(1, keepdims=True)
        if step >= self._next_table or step == self._run.resolved.total_steps:
            self._next_table = step * _TABLE_GROWTH
            self._io.log.log_event("expert_load", step=step, blocks=self._blocks, loads=relative.round(2).tolist())
        self._warn(step, loads, tokens)
        balance = loss.balance_loss * sums[:, BALANCE].sum() * self._run.seq_len(step - 1) / tokens
        values = {
            "router_loss": balance + loss.router_z_loss * sums[:, Z_SQUARED].sum() / tokens,
            "expert_load_max": relative.max(),
            "expert_load_mean": relative.max(1).mean(),
            "expert_load_min": relative.min(),
            "router_entropy": sums[:, ENTROPY].mean() / tokens,
        }
        if shape.router_bias:
            values["tokens_moved"] = sums[:, MOVED].mean() / tokens
        return {name: float(value) for name, value in values.items()}

    def _warn(self, step: int, loads: NDArray[np.float64], tokens: float) -> None:
        found = self._detector.add(step, loads, tokens)
        if found is None:
            return
        rows, experts, what, since = found
        loss, shape = self._run.resolved.loss, self._run.resolved.shape
        blocks = [self._blocks[row] for row in rows]
        others = f"; so have those of blocks {_listed(blocks[1:])}" if len(blocks) > 1 else ""
        raised = f"balance_loss (now {loss.balance_loss:g})"
        if shape.router_bias:
            raised = f"router_bias_speed (now {loss.router_bias_speed:g})"
        self._io.report(
            f"WARNING: step {step}: the router of block {blocks[0]} has collapsed: {what} "
            f"expert{'s' if len(experts) > 1 else ''} {_listed(experts)} of {shape.num_experts} since step {since}"
            f"{others}. Raise {raised}, give router_z_loss 1e-3, lower the learning rate or lengthen the warm-up, from "
            "a checkpoint before that"
        )
        assert self._io.log is not None
        self._io.log.log_event("collapsed_router", step=step, blocks=blocks, experts=experts, what=what, since=since)


class CollapseDetector:
    """Judges readings one after the other, until one router has collapsed."""

    def __init__(self, blocks: int, experts: int) -> None:
        self._first = np.full((2, blocks, experts), -1)
        """First step of a series in which an expert is unused, or gets nearly all tokens; -1 outside of one."""
        self._readings = np.zeros_like(self._first)
        self._is_done = False

    def add(self, step: int, loads: NDArray[np.float64], tokens: float) -> tuple[list[int], list[int], str, int] | None:
        """Judge the tokens per expert [blocks, experts] of a step of `tokens`.

        Returns the rows of blocks whose router has collapsed; and of the first of them the experts, what they get, and
        since when. Returns that once.
        """
        if self._is_done or loads.mean() < _MIN_TOKENS:
            return None
        mean = loads.mean(1, keepdims=True)
        # Where most experts are chosen, each gets nearly all tokens.
        states = np.stack((loads < _UNUSED * mean, (loads >= NEARLY_ALL * tokens) & (loads >= _OVERLOADED * mean)))
        self._first = np.where(states, np.where(self._first < 0, step, self._first), -1)
        self._readings = np.where(states, self._readings + 1, 0)
        collapsed = states & (step - self._first >= PATIENCE_STEPS) & (self._readings >= MIN_READINGS)
        if not collapsed.any():
            return None
        self._is_done = True
        rows = np.flatnonzero(collapsed.any((0, 2))).tolist()
        kind = int(not collapsed[0, rows[0]].any())
        experts = np.flatnonzero(collapsed[kind, rows[0]]).tolist()
        what = (
            f"less than {_UNUSED:g} of the mean load has gone to",
            f"over {NEARLY_ALL:.0%} of the tokens have gone to",
        )[kind]
        return rows, experts, what, int(self._first[kind, rows[0]][experts].max())


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _MAX_NAMES} more" if len(numbers) > _MAX_NAMES else ""
    return f"{', '.join(map(str, numbers[:_MAX_NAMES]))}{more}"
