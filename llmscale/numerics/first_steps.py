"""Check the first steps of a real run at full size: the links that need no second model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import gradient_norm
from llmscale.numerics.links import LINKS, Finding, LinkJudge, MeanGradients, Watched, first_wrong
from llmscale.numerics.probe import Probe, choose_strides
from llmscale.numerics.report import as_row, describe_wrong, worst_rows

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Memory of a rank for copies.
_BUDGET_BYTES = 2**30
#: Copies of an element: weight as used, and before and after the step with gradient and two states each.
_COPIES = 8
#: Elements of matrices that Muon's step is checked for: fp64 orthogonalises a few million in seconds.
_MATRIX_ELEMENTS = 2**22


class FirstSteps:
    """Watches an engine for a number of steps. Every rank calls it at the same steps."""

    def __init__(
        self,
        config: RunConfig,
        resolved: ResolvedRun,
        engine: DeepSpeedEngine,
        group: dist.ProcessGroup,
        *,
        micro_steps: int,
        is_compiled: bool,
        is_new: bool,
    ) -> None:
        """is_new: whether the optimizer has taken no step yet."""
        elements = {tensor.name: tensor.elements for tensor in resolved.tensors.trainable}
        strides = choose_strides(elements, micro_steps + _COPIES, _BUDGET_BYTES)
        copied = sum(-(-count // strides[name]) for name, count in elements.items())
        self.share_copied = copied / sum(elements.values())
        """Share of the weights that is compared."""
        self.copies_bytes = 4 * copied * (micro_steps + _COPIES)
        """Memory of a rank for copies, at most."""
        self._watched = Watched(config, resolved, group, strides, _first_matrices(elements, strides))
        self._probe = Probe(engine, strides, is_compiled=is_compiled)
        self._judge = LinkJudge(self._watched, self._probe, steps_counted=0 if is_new else None)
        self._engine, self._findings = engine, list[Finding]()

    def judge(self, step: int, lr: float) -> None:
        """Judge the step after `step` steps, taken with the learning rate `lr`. Collective."""
        means = MeanGradients(self._watched, self._probe)
        self._findings += self._judge.judge(step, lr, gradient_norm(self._engine), means.of)
        self._probe.reset()

    def skip(self) -> None:
        """Forget a step that the optimizer has not taken."""
        self._probe.reset()

    def close(self) -> None:
        """Remove the hooks."""
        self._probe.close()

    def describe(self) -> str:
        """Return one line about the judged steps."""
        compared = "" if self.share_copied == 1 else f", on {self.share_copied:.0%} of the weights"
        steps = sorted({finding.step + 1 for finding in self._findings})
        wrong = first_wrong(self._findings)
        if wrong is not None:
            return f"WARNING: the numbers of step {wrong.step + 1} are wrong: {describe_wrong(as_row(wrong))}"
        rows = worst_rows(self._findings, LINKS)
        shares = ", ".join(f"{row.link} {row.share or 0:.2f}" for row in rows)
        where = f"{self._watched.size} ranks{compared}"
        return (
            f"numbers: steps {steps[0]} to {steps[-1]} are right on {where}; shares of what rounding explains: {shares}"
        )


def _first_matrices(elements: Mapping[str, int], strides: Mapping[str, int]) -> frozenset[str]:
    """Return the first parameters that are copied completely, as many as are checked in seconds."""
    names, total = [], 0
    for name, count in elements.items():
        if strides[name] == 1 and total + count <= _MATRIX_ELEMENTS:
            names.append(name)
            total += count
    return frozenset(names)
