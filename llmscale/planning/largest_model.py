"""The largest model of a family that fits: its presets, and the shapes between and beyond them. No torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.presets import PRESETS
from llmscale.planning.largest_micro_batch import Fit, Job, Search, fit_at
from llmscale.planning.strategy import Strategy, legal_strategies, strategy_of

#: Widths are multiples of this, so that heads of 64 and 128 fit and the matrix products are even.
WIDTH_MULTIPLE = 128
#: About 26,000B parameters: no machine of today trains more.
LARGEST_WIDTH = 65_536
GPT3 = "gpt3"
#: Whose presets have sizes of their own. Those of the others are GPT-2's, which GPT-3 goes on from, or for tests.
_OWN_SIZES = ("llama3", "qwen3", "smollm2")
#: Of such a family: query heads together, key heads together, MLP, depth.
_SCALED: tuple[Callable[[GPTShape], int], ...] = (
    lambda shape: shape.n_head * shape.head_dim,
    lambda shape: shape.n_kv_head * shape.head_dim,
    lambda shape: shape.mlp_width,
    lambda shape: shape.n_layer,
)


@dataclass(frozen=True)
class LargestModel:
    """The largest model that one strategy can train on a job's machines."""

    strategy: Strategy
    fit: Fit | None
    """None when not even the smallest model of the family fits."""
    shape: GPTShape | None
    preset: str | None
    """The largest preset that is not larger."""


def interpolated_shape(n_embd: int, like: GPTShape, family: str = GPT3) -> GPTShape:
    """The family's model of that width; vocabulary, context, dropout, norm and the rest are those of `like`.

    Depth: the family's presets read as a function of the width, straight lines between them in logarithms and on below
    the narrowest; beyond the widest in proportion to the width, as GPT-3's two largest are (Brown et al. 2020, table
    2.1). Heads: GPT-3's are of 64 up to a width of 2,048 and of 128 above, its MLP keeps the ratio of `like`; of other
    families the width of all heads and of the MLP are read as the depth is.
    """
    if family != GPT3:
        return _shape_of_family(n_embd, like, family)
    head_dim = 64 if n_embd <= 2048 else 128
    depth = _along(n_embd, {shape.n_embd: shape.n_layer for shape in _presets(family, like)})
    return like.changed({"n_layer": max(1, depth), "n_head": max(1, n_embd // head_dim), "n_embd": n_embd})


def _along(n_embd: int, sizes: Mapping[int, int]) -> int:
    """A size at one width, from those at the widths of a family's presets."""
    points = sorted(sizes.items())
    widest, last = points[-1]
    if n_embd >= widest:
        return round(last * n_embd / widest)
    place = max(bisect.bisect_left([width for width, _ in points], n_embd), 1)
    (w0, s0), (w1, s1) = points[place - 1], points[place]
    return round(s0 * (s1 / s0) ** (math.log(n_embd / w0) / math.log(w1 / w0)))


def _shape_of_family(n_embd: int, like: GPTShape, family: str) -> GPTShape:
    presets = _presets(family, like)
    nearest = min(presets, key=lambda shape: abs(math.log(shape.n_embd / n_embd)))
    head_dim = nearest.head_dim
    queries, keys, mlp_width, n_layer = (
        _along(n_embd, {shape.n_embd: size(shape) for shape in presets}) for size in _SCALED
    )
    # Whole groups of query heads that share a key.
    n_kv_head = max(1, round(keys / head_dim))
    n_head = n_kv_head * max(1, round(queries / head_dim / n_kv_head))
    # A head of its own belongs to a family's large models; what all of them differ in from `like` the user chose.
    tied = nearest.tied if like.tied in {shape.tied for shape in presets if shape.n_embd == like.n_embd} else like.tied
    sizes = {"n_layer": max(1, n_layer), "n_embd": n_embd, "n_head": n_head, "n_kv_head": n_kv_head, "tied": tied}
    return like.changed({**sizes, "head_dim": head_dim, "mlp_width": max(64, round(mlp_width / 64) * 64)})


def scaling_family(model: str | None) -> str:
    """Whose depths and heads a model of that name has at other sizes: its own family's, else GPT-3's."""
    family = (model or "").rpartition("-")[0]
    return family if family in _OWN_SIZES else GPT3


def find_largest_models(search: Search, family: str = GPT3) -> list[LargestModel]:
    """For every strategy that DeepSpeed can train, at the job's micro-batch or 1; what the family does not scale is the
    job's shape's."""
    job = search.job
    found: list[LargestModel] = []
    width = WIDTH_MULTIPLE
    for ds, mode in legal_strategies(search.precision, search.nvme_path, search.modes):
        best = _find_largest(ds, job, mode, width, family)
        shape = None if best is None else interpolated_shape(best[0], job.shape, family)
        # Neighbouring rows are alike: the next search begins where this one ended.
        width = WIDTH_MULTIPLE if best is None else best[0]
        found.append(
            LargestModel(strategy_of(ds, mode), None if best is None else best[1], shape, _preset_below(shape, family))
        )
    return found


def _find_largest(ds: DsConfig, job: Job, mode: CheckpointingMode, start: int, family: str) -> tuple[int, Fit] | None:
    """The largest width that fits and its row. Steps away from `start` are doubled until the answer lies between two
    of them, and halved again: large models that are far from fitting take long to estimate."""

    def fit(width: int) -> Fit:
        shape = interpolated_shape(width, job.shape, family)
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


def _names(family: str) -> list[str]:
    return [name for name in PRESETS if name.rpartition("-")[0] == family]


def _presets(family: str, like: GPTShape) -> list[GPTShape]:
    """At the vocabulary and context of `like`, ascending; of one width the deepest comes last."""
    shapes = [PRESETS[name].shape(like.vocab_size, like.seq_len) for name in _names(family)]
    return sorted(shapes, key=lambda shape: (shape.n_embd, shape.n_layer))


def _preset_below(shape: GPTShape | None, family: str) -> str | None:
    """The family's largest preset that has no more parameters than `shape`, at its context and vocabulary."""
    if shape is None:
        return None
    names = _names(family) + (_names("gpt2") if family == GPT3 else [])
    sizes = {name: _preset_parameters(name, shape, family) for name in names}
    fitting = [name for name, size in sizes.items() if size <= shape.num_parameters]
    return max(fitting, key=lambda name: sizes[name], default=None)


def _preset_parameters(name: str, like: GPTShape, family: str) -> int:
    preset = PRESETS[name]
    if family != GPT3:
        return interpolated_shape(preset.n_embd, like, family).num_parameters
    sizes = {"n_layer": preset.n_layer, "n_head": preset.n_head, "n_embd": preset.n_embd}
    return like.changed(sizes).num_parameters
