"""gpu.sh's tables and targets, and the constants of the estimates that its cells measure. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmscale.config.hardware import GPU
from llmscale.planning.kernels import memory_bytes_per_s
from llmscale.planning.step_time import TokenWork
from scripts.bench.harness import GIB

BEGIN, END = "<!-- gpu-table:begin -->", "<!-- gpu-table:end -->"
MFU_FORMULA = (
    "MFU = tokens/s x FLOPs per token / peak. FLOPs per token: 6 per weight of a matrix product and 12 L h s for "
    "attention, not halved for the causal mask, recomputation not counted (PaLM, appendix B). Peak: dense 16-bit"
)
Row = Mapping[str, object]
_7_TO_8B = ("gpt3-6.7b", "llama3-8b")


def heading() -> str:
    return (
        f"{'cell':<54}{'micro':>6}{'recompute':>10}{'tokens/s':>11}{'MFU':>7}"
        f"{'peak GiB':>10}{'estimate':>10}{'error':>7}  first step"
    )


def row_line(row: Row) -> str:
    """Return the line of a cell: its numbers, or why it was not measured."""
    if "problem" in row:
        return f"{row['cell']:<54} not measured: {row['problem']}"
    peak = _gib(row.get("peak_bytes"))
    estimate, error = _gib(row.get("estimate_bytes")), _error(row)
    if row["kind"] == "grid":
        reserved, outside = _gib(row.get("reserved_bytes")), _gib(row.get("outside_torch_bytes"))
        return f"{row['cell']:<54}{'':>34}{peak:>10}{estimate:>10}{error:>7}  reserved {reserved}, outside {outside}"
    mfu = f"{row['mfu']:.1%}" if row.get("mfu") is not None else "-"
    return (
        f"{row['cell']:<54}{row['micro_batch_size']:>6}{row['checkpointing']:>10}{row['tokens_per_second']:>11,.0f}"
        f"{mfu:>7}{peak:>10}{estimate:>10}{error:>7}  {row['first_step_s']:.1f} s"
    )


def readme_table(rows: Sequence[Row], device: str, targets: Sequence[str]) -> str:
    """Return the README's table between its markers: cells with a speed, and the targets."""
    lines = [BEGIN, f"One {device}, bf16, `scripts/bench/gpu.sh`:", ""]
    lines += [
        "| run | micro-batch | tokens/s | MFU | peak GiB | estimated |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if "tokens_per_second" in row:
            mfu = f"{row['mfu']:.1%}" if row.get("mfu") is not None else "-"
            peak, estimate = _gib(row.get("peak_bytes")), _gib(row.get("estimate_bytes"))
            cells = [row["cell"], row["micro_batch_size"], f"{row['tokens_per_second']:,.0f}", mfu, peak, estimate]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *(f"- {target}" for target in targets), END]) + "\n"


def replace_table(readme: str, table: str) -> str:
    """Return `readme` with the text between its markers replaced by `table`. Raises ValueError without them."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"it needs one line {BEGIN} and below it one line {END}")
    before, _, rest = readme.partition(BEGIN)
    return before + table.rstrip("\n") + rest.partition(END)[2]


def judge_targets(rows: Sequence[Row], gpu: str | None, *, is_gpu: bool = True) -> list[str]:
    """Return a line per target: met, NOT met or not measured. They are for one H100; `gpu`: name in the table."""
    rows = rows if is_gpu else ()
    lines = [
        _judge_mfu(rows, "124M", 0.50, lambda row: row["model"] == "gpt2-124m"),
        _judge_mfu(rows, "1.5B", 0.55, lambda row: row["model"] == "gpt2-1.5b"),
        _judge_mfu(rows, "7-8B", 0.58, lambda row: row["model"] in _7_TO_8B and not row["n_layer"]),
    ]
    part = [row for row in rows if "tokens_per_second" in row and row["model"] == "llama3-8b" and row["n_layer"]]
    if part and part[0].get("mfu") is not None:
        lines[-1] += f" ({part[0]['n_layer']} of its 32 blocks without offload: {part[0]['mfu']:.1%})"
    lines.append(_judge_nanogpt(rows))
    if gpu != "h100-80gb":
        other = "a GPU that is not in the table" if is_gpu else "a CPU"
        lines.append(f"the targets are for one H100 80GB; this is {gpu or other}")
    return lines


def _judge_mfu(rows: Sequence[Row], name: str, target: float, belongs) -> str:
    mfus = [row["mfu"] for row in rows if row.get("mfu") is not None and row["kind"] == "train" and belongs(row)]
    words = f"MFU at {name}, bf16, at least {target:.0%}:"
    if not mfus:
        return f"{words} not measured"
    return f"{words} {'met' if max(mfus) >= target else 'NOT met'}, {max(mfus):.1%}"


def _judge_nanogpt(rows: Sequence[Row]) -> str:
    """Compare the same turns of both, at the same micro-batch; the smallest ratio counts."""
    ours, theirs = (
        {(row["turn"], row.get("micro_batch_size")): row for row in rows if _is_of_pair(row, kind)}
        for kind in ("train", "nanogpt")
    )
    ratios = [
        ours[n]["tokens_per_second"] / theirs[n]["tokens_per_second"] for n in sorted(ours.keys() & theirs.keys())
    ]
    words = "ZeRO-1 at least as fast as nanoGPT, same card, micro-batch and step:"
    if not ratios:
        return f"{words} not measured"
    ratio_texts = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"{words} {'met' if min(ratios) >= 1 else 'NOT met'}, {ratio_texts} times its tokens/s"


def _is_of_pair(row: Row, kind: str) -> bool:
    return row["kind"] == kind and row.get("compared", False) and "tokens_per_second" in row


def constant_lines(constants: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a line per constant: assumed and measured value."""
    lines = []
    for constant in constants:
        measured = "not measured" if constant["measured"] is None else f"measured {constant['measured']:,.10g}"
        lines.append(f"{constant['home']} {constant['name']}: assumed {constant['assumed']:,.10g}, {measured}")
    return lines


def _gib(value: object) -> str:
    return f"{value / GIB:.2f}" if isinstance(value, int) else "-"


def _error(row: Row) -> str:
    peak, estimate = row.get("peak_bytes"), row.get("estimate_bytes")
    return f"{estimate / peak - 1:+.1%}" if isinstance(peak, int) and isinstance(estimate, int) else "-"


MIB = 2**20
#: Smallest saving, as a fraction of a step, that can be distinguished from noise.
_LEAST_SAVED = 0.005


@dataclass(frozen=True)
class Constant:
    """Number that an estimate assumes."""

    name: str
    home: str
    """Module that defines it, relative to the repository."""
    assumed: float
    measured: float | None
    """Measured value, or None if no cell shows it."""
    source: str
    """Origin of the measured value."""


def context_bytes(rows: Sequence[Mapping[str, object]]) -> float | None:
    """Return the most bytes that a GPU's row of memory_grid.py held outside PyTorch's allocator, in whole MiB."""
    sizes = [row["outside_torch_bytes"] for row in rows if isinstance(row.get("outside_torch_bytes"), int)]
    return math.ceil(max(sizes) / MIB) * MIB if sizes else None


def reserved_per_allocated(rows: Sequence[Mapping[str, object]]) -> float | None:
    """Return the 90th percentile of reserved over allocated bytes of a GPU's rows, rounded up to a hundredth."""
    ratios = [row["reserved_bytes"] / row["peak_bytes"] for row in rows if "reserved_bytes" in row]
    return math.ceil(round(100 * float(np.quantile(ratios, 0.9)), 6)) / 100 if ratios else None


def compile_seconds(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the seconds of compiling from pairs of first steps (eager, compiled); None if it took none."""
    median_s = statistics.median(compiled - eager for eager, compiled in pairs) if pairs else 0.0
    return median_s if median_s > 0 else None


def saved_element_bytes(pairs: Sequence[tuple[float, float, float]], gpu: GPU) -> float | None:
    """Return the bytes of memory traffic per element that compiled blocks save; None if they save nothing.

    pairs: elements per token, seconds per token eager and compiled.
    """
    if not pairs or statistics.median(1 - compiled / eager for _, eager, compiled in pairs) < _LEAST_SAVED:
        return None
    saved_per_element = statistics.median((eager - compiled) / elements for elements, eager, compiled in pairs)
    return saved_per_element * memory_bytes_per_s(gpu)


def fit_efficiency(runs: Sequence[tuple[TokenWork, float]], gpu: GPU) -> tuple[float, float] | None:
    """Return the fractions of the 16-bit peak that matrix products and attention reached.

    Least squares over relative errors of planning's formula, with its memory traffic taken as given. runs: work and
    seconds per token of eager passes. None for fewer than three runs, or a result outside (0, 1].
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
