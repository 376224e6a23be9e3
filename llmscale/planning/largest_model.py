"""The largest model of the family that fits: GPT-3's presets, and the shapes between and beyond them. No torch."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import DsConfig
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.presets import PRESETS
from llmscale.planning.largest_micro_batch import Fit, Job, Search, fit_at
from llmscale.planning.strategy import Strategy, legal_strategies, strategy_of

#: Widths are multiples of this, so that heads of 64 and 128 fit and the matrix products are even.
WIDTH_MULTIPLE = 128
#: About 26,000B parameters: no machine of today trains more.
LARGEST_WIDTH = 65_536


@dataclass(frozen=True)
class LargestModel:
    """The largest model that one strategy can train on a job's machines."""

    strategy: Strategy
    fit: Fit | None
    """None when not even the smallest model of the family fits."""
    shape: GPTShape | None
    preset: str | None
    """The largest preset that is not larger."""


def interpolated_shape(n_embd: int, like: GPTShape) -> GPTShape:
    """The family's model of that width; vocabulary, context, dropout and the rest are those of `like`.

    Depth: GPT-3's table (Brown et al. 2020, table 2.1) read as a function of the width, straight lines between its
    points in logarithms; it hardly grows up to 24 layers at 2,048, then to 96 at 12,288, and on at that slope. Heads:
    of 64 up to a width of 2,048, of 128 above, as those of the table's ends.
    """
    widths, depths = zip(*_gpt3_points(), strict=True)
    place = min(max(bisect.bisect_left(widths, n_embd), 1), len(widths) - 1)
    (w0, d0), (w1, d1) = ((widths[i], depths[i]) for i in (place - 1, place))
    share = math.log(n_embd / w0) / math.log(w1 / w0)
    n_layer = max(1, round(d0 * (d1 / d0) ** share))
    head_dim = 64 if n_embd <= 2048 else 128
    return like.changed({"n_layer": n_layer, "n_head": max(1, n_embd // head_dim), "n_embd": n_embd})


def find_largest_models(search: Search) -> list[LargestModel]:
    """For every strategy that DeepSpeed can train, at the job's micro-batch or 1; what is not scaled is its shape's."""
    job = search.job
    found: list[LargestModel] = []
    width = WIDTH_MULTIPLE
    for ds, mode in legal_strategies(search.precision, search.nvme_path, search.modes):
        best = _find_largest(ds, job, mode, width)
        shape = None if best is None else interpolated_shape(best[0], job.shape)
        # Neighbouring rows are alike: the next search begins where this one ended.
        width = WIDTH_MULTIPLE if best is None else best[0]
        found.append(
            LargestModel(strategy_of(ds, mode), None if best is None else best[1], shape, _preset_below(shape))
        )
    return found


def _find_largest(ds: DsConfig, job: Job, mode: CheckpointingMode, start: int) -> tuple[int, Fit] | None:
    """The largest width that fits and its row. Steps away from `start` are doubled until the answer lies between two
    of them, and halved again: large models that are far from fitting take long to estimate."""

    def fit(width: int) -> Fit:
        shape = interpolated_shape(width, job.shape)
        return fit_at(ds, replace(job, shape=shape), mode, job.micro_batch_size or 1)

    low, high = 0, LARGEST_WIDTH + WIDTH_MULTIPLE
    best: Fit | None = None
    width, step = start, WIDTH_MULTIPLE
    while high - low > WIDTH_MULTIPLE:
        found = fit(width)
        if found.fits:
            low, best = width, found
            step = 2 * step if high > LARGEST_WIDTH else max(WIDTH_MULTIPLE, _halved(high - low))
            width = min(low + step, high - WIDTH_MULTIPLE)
        else:
            high = width
            step = 2 * step if low == 0 else max(WIDTH_MULTIPLE, _halved(high - low))
            width = max(high - step, low + WIDTH_MULTIPLE)
    return None if best is None else (low, best)


def _halved(distance: int) -> int:
    return distance // 2 // WIDTH_MULTIPLE * WIDTH_MULTIPLE


def _gpt3_points() -> list[tuple[int, int]]:
    """(width, depth) of GPT-3's models, ascending; depth never falls with the width."""
    points: dict[int, int] = {}
    for name, preset in PRESETS.items():
        if name.startswith("gpt3-"):
            points[preset.n_embd] = max(points.get(preset.n_embd, 0), preset.n_layer)
    return sorted(points.items())


def _preset_below(shape: GPTShape | None) -> str | None:
    """The largest preset of the GPTs that has no more parameters than `shape`, at its context and vocabulary."""
    if shape is None:
        return None
    sizes = {name: _preset_parameters(name, shape) for name in PRESETS if name.startswith(("gpt2", "gpt3"))}
    fitting = [name for name, size in sizes.items() if size <= shape.num_parameters]
    return max(fitting, key=lambda name: sizes[name], default=None)


def _preset_parameters(name: str, like: GPTShape) -> int:
    preset = PRESETS[name]
    sizes = {"n_layer": preset.n_layer, "n_head": preset.n_head, "n_embd": preset.n_embd}
    return like.changed(sizes).num_parameters
