"""What gpu.py's cells say about constants that the estimates assume, and the change to the source that they ask for.

A constant has one home, the module that uses it. gpu.py changes none by itself: it writes a patch, to be read and
applied with `git apply`.
"""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmscale.config.hardware import GPU
from llmscale.planning.compute_time import TokenWork
from llmscale.planning.kernels import memory_bytes_per_s

MIB = 2**20
#: Less than this part of a step is no saving that can be told from chance, or spelled in hundredths.
_LEAST_SAVED = 0.005


@dataclass(frozen=True)
class Constant:
    """A number that an estimate assumes."""

    name: str
    home: str
    """The module, from the repository's root."""
    assumed: float
    measured: float | None
    """None: no cell of this run shows it."""
    source: str
    """What it was measured with."""

    def literal(self) -> str:
        """The measured value as the module would spell it."""
        assert self.measured is not None
        if self.name == "CONTEXT_BYTES":
            return f"{round(self.measured / MIB)} * 2**20"
        return f"{self.measured:.2f}" if self.measured < 10 else f"{self.measured:.1f}"


def context_bytes(rows: Sequence[Mapping[str, object]]) -> float | None:
    """The most that a row of memory_grid.py on a GPU held outside of PyTorch's allocator, in whole MiB: an estimate
    that is to fit counts with the largest."""
    found = [row["outside_torch_bytes"] for row in rows if isinstance(row.get("outside_torch_bytes"), int)]
    return math.ceil(max(found) / MIB) * MIB if found else None


def reserved_per_allocated(rows: Sequence[Mapping[str, object]]) -> float | None:
    """Reserved over allocated bytes at the peak, that of nine rows in ten or less, rounded up to a hundredth. Of rows
    on a GPU alone."""
    found = [row["reserved_bytes"] / row["peak_bytes"] for row in rows if "reserved_bytes" in row]
    return math.ceil(round(100 * float(np.quantile(found, 0.9)), 6)) / 100 if found else None


def compile_seconds(pairs: Sequence[tuple[float, float]]) -> float | None:
    """What compiling took, from the first steps' seconds of the same run, eager and compiled; None where that is
    nothing, as out of a warm cache."""
    found = statistics.median(compiled - eager for eager, compiled in pairs) if pairs else 0.0
    return found if found > 0 else None


def saved_element_bytes(pairs: Sequence[tuple[float, float, float]], gpu: GPU) -> float | None:
    """Bytes that compiled blocks move less through memory for every element that they make, from elements per token and
    seconds per token, eager and compiled; None where they save nothing."""
    if not pairs or statistics.median(1 - compiled / eager for _, eager, compiled in pairs) < _LEAST_SAVED:
        return None
    found = statistics.median((eager - compiled) / elements for elements, eager, compiled in pairs)
    return found * memory_bytes_per_s(gpu)


def fit_efficiency(runs: Sequence[tuple[TokenWork, float]], gpu: GPU) -> tuple[float, float] | None:
    """The parts of the 16-bit peak that matrix products and attention reached: least squares over relative errors of
    llmscale.planning.compute_time's formula, its traffic through memory taken as it is.

    runs: work and seconds per token of forward and backward passes, eager. None where two kinds of work cannot be told
    apart: fewer than three runs, or a result outside of (0, 1].
    """
    if len(runs) < 3:
        return None
    work = np.array([[run.matmul_flops, run.attention_flops] for run, _ in runs]) / gpu.dense_16bit_flops
    seconds = np.array([took for _, took in runs])
    moving = np.array([run.moved_bytes for run, _ in runs]) / memory_bytes_per_s(gpu)
    inverse, *_ = np.linalg.lstsq(work / seconds[:, None], (seconds - moving) / seconds, rcond=None)
    if (inverse < 1).any():
        return None
    return float(1 / inverse[0]), float(1 / inverse[1])


def make_patch(repository: Path, constants: Sequence[Constant]) -> str:
    """A unified diff that gives every measured constant its value and says where it is from. ValueError when a
    constant is not where it is said to be."""
    pieces = []
    for home in sorted({constant.home for constant in constants}):
        before = after = (repository / home).read_text()
        for constant in constants:
            if constant.home == home and constant.measured is not None:
                after = _replace(after, constant)
        lines = (text.splitlines(keepends=True) for text in (before, after))
        pieces += difflib.unified_diff(*lines, f"a/{home}", f"b/{home}")
    return "".join(pieces)


def _replace(text: str, constant: Constant) -> str:
    """The assignment, and the comment above it if it has one."""
    pattern = rf"(?:^#:.*\n)*^{constant.name} = .*$"
    line = f"#: Measured: {constant.source}.\n{constant.name} = {constant.literal()}"
    text, count = re.subn(pattern, lambda _: line, text, flags=re.M)
    if count != 1:
        raise ValueError(f"{constant.home} has {count} lines '{constant.name} = ...'")
    return text
