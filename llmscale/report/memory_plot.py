"""Plot memory by category as stacked bars against the GPU's memory. Needs matplotlib only when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from llmscale.memory.breakdown import GIB, Breakdown
from llmscale.memory.estimate import MemoryEstimate
from llmscale.report.save_figure import import_pyplot, save_figure

#: Colours that colour-blind readers can tell apart (Okabe and Ito), in the order of Breakdown's fields.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#F0E442", "#CC79A7", "#D55E00")
_NAMES = {"logits_bytes": "logits and loss", "optimizer_bytes": "optimizer states", "buckets_bytes": "communication"}
#: Bars longer than this multiple of the GPU's memory are cut, with their number at the cut.
_LONGEST = 1.1


@dataclass(frozen=True)
class MemoryBar:
    """One row of `llmscale estimate`."""

    label: str
    estimate: MemoryEstimate
    fits: bool
    is_recommended: bool


def plot_memory(path: Path, bars: Sequence[MemoryBar], gpu_bytes: int, title: str) -> None:
    """Draw to `path`, in the format of its suffix.

    Raises ConfigError without matplotlib, or when the file cannot be written.
    """
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.28 * len(bars)), layout="constrained")
    limit = _LONGEST * gpu_bytes / GIB
    parts = _parts(bars)
    ends = [0.0] * len(bars)
    for (name, values), colour in zip(parts.items(), (*_COLOURS, "#BBBBBB", "#777777"), strict=True):
        widths = [min(value / GIB, max(0.0, limit - end)) for value, end in zip(values, ends, strict=True)]
        axes.barh(range(len(bars)), widths, left=ends, color=colour, label=name, height=0.75)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        total = bar.estimate.total_bytes / GIB
        text = f"{total:,.1f}" + (" »" if total > limit else "")
        axes.text(
            end + 0.005 * limit,
            row,
            text,
            va="center",
            fontsize=8,
            color="black" if bar.fits else "#B00000",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.axvline(gpu_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.text(gpu_bytes / GIB, -0.9, f" the GPU: {gpu_bytes / GIB:.1f} GiB", va="bottom", fontsize=9)
    axes.set_yticks(range(len(bars)), [f"{'→ ' if bar.is_recommended else ''}{bar.label}" for bar in bars], fontsize=8)
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if bar.is_recommended else "normal")
        tick.set_color("black" if bar.fits else "#777777")
    axes.set(xlim=(0, limit * 1.08), ylim=(len(bars) - 0.4, -1.6), xlabel="GiB on one GPU at the peak")
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save_figure(figure, path)


def _parts(bars: Sequence[MemoryBar]) -> dict[str, list[int]]:
    """Return the bytes of each bar, by category."""
    peaks = [bar.estimate.peak for bar in bars]
    parts = {
        _NAMES.get(field.name, field.name.removesuffix("_bytes")): [getattr(peak, field.name) for peak in peaks]
        for field in fields(Breakdown)
    }
    parts["allocator's reserve"] = [bar.estimate.reserve_bytes for bar in bars]
    parts["context and libraries"] = [bar.estimate.context_bytes for bar in bars]
    return parts
