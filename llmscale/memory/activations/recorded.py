"""Recorded passes through a model, evaluated for any shape. No torch.

`llmscale.dry_run.recording` follows every allocation of the real model's forward and backward pass at small shapes, and
`llmscale.dry_run.recording` writes each size as coefficient x product of symbols. What is left is a small table: a
micro-step is a sequence of segments, and of each segment the moments that can be its peak, as counts over formulas.
Nothing in it is estimated; a branch that was not recorded is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path

from llmscale.errors import ConfigError
from llmscale.memory.activations.recording_cache import read_recording
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch, related_branches
from llmscale.memory.breakdown import allocated_bytes

#: In the order of time. `end_forward`: the outermost autocast region ends and its cache of cast weights goes.
SEGMENTS = (
    *("embed_forward", "block_forward", "head_forward", "end_forward"),
    *("head_backward", "block_backward", "embed_backward"),
)
#: Segments whose operators the block decides; the others' are those of embeddings and head.
BLOCK_SEGMENTS = ("block_forward", "end_forward", "block_backward")
#: Recorded by `python scripts/record_memory.py`: a table for each style of blocks, and one for everything around them.
TABLES = Path(__file__).parent / "tables"
ENDS_TABLE = "ends"

#: How many of each formula are alive: `"activation 2*b*t*a*d" -> 3`. A formula is its kind, a coefficient (of bytes; of
#: elements for a parameter's gradient) and symbols. Kinds: `activation` made by the forward pass, or again by a
#: recomputation; `logits` the same from the first tensor over the vocabulary on; `temporary` gradients of activations
#: and work space of kernels; `cast` weights in 16 bit that autocast made; `gradient` of a parameter, from when autograd
#: hands it over (until then it is a temporary).
Counts = Mapping[str, int]


class NotRecorded(ConfigError):
    """A branch of the model's code that no table has, and nobody has recorded on this machine."""

    def __init__(self, branches: Sequence[BlockBranch | EndsBranch]) -> None:
        super().__init__(
            "the activation memory of this model's blocks is in no table and was not recorded on this machine. It "
            "trains all the same; `llmscale estimate` of it records them once."
        )
        self.branches = branches
        """To record: it, and those that the same question may come to."""


@dataclass(frozen=True)
class RecordedSegment:
    """One segment of a micro-step."""

    net: Counts
    """What it leaves behind, or takes away (negative)."""
    per_block: Counts
    """What it takes away once for every block of the model."""
    moments: tuple[Counts, ...]
    """Beyond what was alive when it began, at every moment that can be its fullest."""
    handovers: tuple[Counts, ...]
    """The same whenever a layer's gradients are handed over: what DeepSpeed then needs for them comes on top."""


@dataclass(frozen=True)
class Moment:
    """Live bytes at one moment of a pass, by what they are, parameters and their gradients left out."""

    activations_bytes: int = 0
    """Made by the forward pass, or again by a recomputation; the loss's too."""
    temporaries_bytes: int = 0
    """Gradients of activations, and work space of kernels."""
    casts_bytes: int = 0
    """Weights in 16 bit that autocast made of fp32 ones."""
    gradient_parameters: int = 0
    """Parameters whose gradients were handed over since the segment began; their bytes are not in the sums above."""
    logits_bytes: int = 0
    """Of the activations, those of the loss."""

    @property
    def total_bytes(self) -> int:
        return self.activations_bytes + self.temporaries_bytes + self.casts_bytes

    def plus(self, other: Moment, times: int = 1) -> Moment:
        """The sum with `times` the other."""
        return Moment(
            self.activations_bytes + times * other.activations_bytes,
            self.temporaries_bytes + times * other.temporaries_bytes,
            self.casts_bytes + times * other.casts_bytes,
            self.gradient_parameters + times * other.gradient_parameters,
            self.logits_bytes + times * other.logits_bytes,
        )

    def minus(self, other: Moment) -> Moment:
        return self.plus(other, -1)


@dataclass(frozen=True)
class Segment:
    """A recorded segment at one shape."""

    net: Moment
    per_block: Moment
    moments: tuple[Moment, ...]
    handovers: tuple[Moment, ...]


@dataclass(frozen=True)
class MicroStep:
    """A forward and a backward pass through `n_layer` equal blocks."""

    n_layer: int
    segments: Mapping[str, Segment]

    @cached_property
    def starts(self) -> dict[str, Moment]:
        """What is alive when a segment begins; of the blocks' the first in the order of time."""
        live, found = Moment(), {}
        for name in SEGMENTS:
            segment = self.segments[name]
            found[name] = live
            times = self.n_layer if name in ("block_forward", "block_backward") else 1
            live = live.plus(segment.net, times).plus(segment.per_block, self.n_layer)
        return found

    @property
    def forward_peak_bytes(self) -> int:
        return self._peak_bytes("forward")

    @property
    def backward_peak_bytes(self) -> int:
        return self._peak_bytes("backward")

    def _peak_bytes(self, direction: str) -> int:
        most = 0
        for name, segment in self.segments.items():
            if not name.endswith(direction):
                continue
            # What is alive changes by the same amount with every block: most is alive in the first or the last.
            for done in (0, self.n_layer - 1) if name.startswith("block") else (0,):
                start = self.starts[name].total_bytes + done * segment.net.total_bytes
                most = max(most, start, *(start + moment.total_bytes for moment in segment.moments))
        return most


def evaluate_segments(segments: Mapping[str, RecordedSegment], symbols: Mapping[str, int], n_layer: int) -> MicroStep:
    """A recording at one shape, `symbols` -> number. Raises KeyError for a symbol that the shape does not have."""
    sizes: dict[str, int] = {}

    def moment(counts: Counts) -> Moment:
        sums = dict.fromkeys(("activation", "logits", "temporary", "cast", "gradient"), 0)
        for formula, count in counts.items():
            size = sizes.get(formula)
            if size is None:
                size = sizes[formula] = _size(formula, symbols)
            sums[formula.partition(" ")[0]] += count * size
        activations = sums["activation"] + sums["logits"]
        return Moment(activations, sums["temporary"], sums["cast"], sums["gradient"], sums["logits"])

    return MicroStep(
        n_layer,
        {
            name: Segment(
                moment(segments[name].net),
                moment(segments[name].per_block),
                tuple(moment(counts) for counts in segments[name].moments),
                tuple(moment(counts) for counts in segments[name].handovers),
            )
            for name in SEGMENTS
        },
    )


def moments_that_matter(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Those that no later moment exceeds: gradients only become more, so a smaller earlier moment is never a peak."""
    kept: list[Moment] = []
    for moment in reversed(list(moments)):
        if not kept or moment.total_bytes > kept[-1].total_bytes:
            kept.append(moment)
    return tuple(reversed(kept))


class RecordedTable:
    """Branches of a model's code, as `llmscale.dry_run.recording.pack_branches` stores them."""

    def __init__(self, stored: Mapping[str, object]) -> None:
        self._stored = stored

    @property
    def keys(self) -> set[str]:
        """Of the branches."""
        return set(self._branches)

    def segments(self, key: str) -> dict[str, RecordedSegment]:
        """Of one branch. Raises KeyError when it was not recorded."""
        return {name: self._segment(index) for name, index in self._branches[key].items()}

    @property
    def _branches(self) -> Mapping[str, Mapping[str, int]]:
        branches = self._stored["branches"]
        assert isinstance(branches, dict)
        return branches

    def _segment(self, index: int) -> RecordedSegment:
        segments = self._stored["segments"]
        assert isinstance(segments, list)
        net, per_block, moments, handovers = json.loads(segments[index])
        return RecordedSegment(
            self._counts(net),
            self._counts(per_block),
            tuple(map(self._counts, moments)),
            tuple(map(self._counts, handovers)),
        )

    def _counts(self, pairs: Sequence[int]) -> dict[str, int]:
        formulas = self._stored["formulas"]
        assert isinstance(formulas, list)
        return {formulas[pairs[i]]: pairs[i + 1] for i in range(0, len(pairs), 2)}


@cache
def read_table(name: str) -> RecordedTable:
    """Of llmscale.model.gpt. Raises FileNotFoundError for a style of blocks that was not recorded."""
    return RecordedTable(json.loads((TABLES / f"{name}.json").read_text()))


@cache
def recorded_segments(block: BlockBranch, ends: EndsBranch) -> Mapping[str, RecordedSegment]:
    """The micro-step of a GPT whose blocks take one branch, and embeddings and head another.

    Raises NotRecorded when either was not.
    """
    found: dict[str, RecordedSegment] = {}
    missing: list[BlockBranch | EndsBranch] = []
    for branch in (ends, block):
        segments = find_segments(branch)
        found |= segments or {}
        if segments is None:
            missing += (related for related in related_branches(branch) if find_segments(related) is None)
    if missing:
        raise NotRecorded(missing)
    return {name: found[name] for name in SEGMENTS}


def table_of(branch: BlockBranch | EndsBranch) -> str:
    """The name of the table that has a branch or would have it."""
    return branch.style.key if isinstance(branch, BlockBranch) else ENDS_TABLE


def find_segments(branch: BlockBranch | EndsBranch) -> dict[str, RecordedSegment] | None:
    """Of one branch, from the tables or from what was recorded on this machine; None where neither has it."""
    with suppress(FileNotFoundError, KeyError):
        return read_table(table_of(branch)).segments(branch.key)
    text = read_recording(table_of(branch), branch.key)
    # What is no recording, because a disk or a user damaged it, is recorded again.
    with suppress(ValueError, TypeError, AttributeError, LookupError, AssertionError):
        segments = RecordedTable(json.loads(text or "")).segments(branch.key)
        in_block = isinstance(branch, BlockBranch)
        is_whole = segments.keys() == {name for name in SEGMENTS if (name in BLOCK_SEGMENTS) == in_block}
        return segments if is_whole else None
    return None


def _size(formula: str, symbols: Mapping[str, int]) -> int:
    """Bytes as the allocator rounds them, of a gradient elements."""
    kind, coefficient, names = _parsed(formula)
    size = coefficient[0] * prod(symbols[name] for name in names) // coefficient[1]
    return size if kind == "gradient" else allocated_bytes(size, 1)


@cache
def _parsed(formula: str) -> tuple[str, tuple[int, int], tuple[str, ...]]:
    kind, _, product = formula.partition(" ")
    coefficient, *names = product.split("*")
    numerator, _, denominator = coefficient.partition("/")
    return kind, (int(numerator), int(denominator or 1)), tuple(names)
