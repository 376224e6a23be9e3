"""Recorded passes through a model, evaluated for any shape. No torch.

`llmscale.dry_run.recording` follows every allocation of the real model's forward and backward pass at small shapes, and
writes each size as coefficient x product of symbols. The result is a small table: a micro-step is a sequence of
segments, each with the moments that can be its peak, as counts over formulas. Nothing in it is estimated; a branch that
was not recorded is an error.

Blocks that are in no table are recorded on this machine and kept in the user's cache folder. Those recordings hold for
the code and the libraries that they were made with, so each such combination has its own folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path

from llmscale import __version__
from llmscale.errors import ConfigError
from llmscale.files.atomic_write import write_durably
from llmscale.files.source_hashes import source_hashes
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch, related_branches
from llmscale.memory.breakdown import allocated_bytes
from llmscale.untrusted.paths import in_home

#: Segments in the order of time. `end_forward`: the outermost autocast region ends and frees its cache of cast weights.
SEGMENTS = (
    *("embed_forward", "block_forward", "head_forward", "end_forward"),
    *("head_backward", "block_backward", "embed_backward"),
)
#: Segments of the block's operators; the others run embeddings and head.
BLOCK_SEGMENTS = ("block_forward", "end_forward", "block_backward")
#: Recorded by `python scripts/record_memory.py`: a table for each style of blocks, and one for embeddings and head.
TABLES = Path(__file__).parent / "tables"
ENDS_TABLE = "ends"
#: Packages of llmscale that determine a recording, beside torch and DeepSpeed.
_RECORDED_FROM = ("architecture", "model", "engine", "dry_run", "memory/activations")

#: Number of live tensors of each formula: `"activation 2*b*t*a*d" -> 3`. A formula is its kind, a coefficient in bytes
#: (in elements for a parameter's gradient) and symbols. Kinds: `activation`, made by the forward pass or a
#: recomputation; `logits`, an activation from the first tensor over the vocabulary on; `temporary`, a gradient of
#: activations or work space of a kernel; `cast`, weights in 16 bit made by autocast; `gradient` of a parameter, from
#: the moment autograd passes it on (until then it is a temporary).
Counts = Mapping[str, int]


class NotRecorded(ConfigError):
    """A branch of the model's code is in no table, and was not recorded on this machine."""

    def __init__(self, branches: Sequence[BlockBranch | EndsBranch]) -> None:
        super().__init__(
            "the activation memory of this model's blocks is in no table and was not recorded on this machine. It "
            "trains all the same; `llmscale estimate` of it records them once."
        )
        self.branches = branches
        """Branches to record: the missing one, and related ones that the same table of strategies needs."""


@dataclass(frozen=True)
class RecordedSegment:
    """One segment of a micro-step."""

    net: Counts
    """Tensors alive after it and not before, or (negative) freed by it."""
    per_block: Counts
    """Tensors that it frees (negative) for every block of the model."""
    moments: tuple[Counts, ...]
    """Additions to what was alive when it began, at every moment that can be its peak."""
    handovers: tuple[Counts, ...]
    """Additions whenever DeepSpeed gets a layer's gradients, without the memory that DeepSpeed needs for them."""


@dataclass(frozen=True)
class Moment:
    """Live bytes at one moment of a pass, without parameters and their gradients."""

    activations_bytes: int = 0
    """Tensors made by the forward pass or a recomputation, the loss's included."""
    temporaries_bytes: int = 0
    """Gradients of activations, and work space of kernels."""
    casts_bytes: int = 0
    """Weights in 16 bit that autocast has made of fp32 ones."""
    gradient_parameters: int = 0
    """Parameters whose gradients DeepSpeed got since the segment began; the other fields leave them out."""
    logits_bytes: int = 0
    """The loss's part of the activations."""

    @property
    def total_bytes(self) -> int:
        return self.activations_bytes + self.temporaries_bytes + self.casts_bytes

    def plus(self, other: Moment, times: int = 1) -> Moment:
        """Return the sum with `times` the other."""
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
        """Live bytes when each segment begins; the first block's in the order of time."""
        live, found = Moment(), {}
        for name in SEGMENTS:
            segment = self.segments[name]
            found[name] = live
            times = self.n_layer if name in ("block_forward", "block_backward") else 1
            live = live.plus(segment.net, times).plus(segment.per_block, self.n_layer)
        return found


def evaluate_segments(segments: Mapping[str, RecordedSegment], symbols: Mapping[str, int], n_layer: int) -> MicroStep:
    """Evaluate a recording at one shape, `symbols` -> number. Raises KeyError for a symbol that the shape lacks."""
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
    """Drop moments that a later one exceeds: gradients only become more, so these are never the peak."""
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
        """Keys of the branches."""
        return set(self._branches)

    def segments(self, key: str) -> dict[str, RecordedSegment]:
        """Return the segments of one branch. Raises KeyError when it was not recorded."""
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
    """Read a table of llmscale.model.gpt. Raises FileNotFoundError for a style of blocks that was not recorded."""
    return RecordedTable(json.loads((TABLES / f"{name}.json").read_text()))


@cache
def recorded_segments(block: BlockBranch, ends: EndsBranch) -> Mapping[str, RecordedSegment]:
    """Return the micro-step of a GPT whose blocks take one branch, and embeddings and head another.

    Raises NotRecorded when either is missing.
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
    """Return the name of the table for a branch."""
    return branch.style.key if isinstance(branch, BlockBranch) else ENDS_TABLE


def find_segments(branch: BlockBranch | EndsBranch) -> dict[str, RecordedSegment] | None:
    """Return one branch from the tables or from this machine's recordings; None where it is missing."""
    with suppress(FileNotFoundError, KeyError):
        return read_table(table_of(branch)).segments(branch.key)
    text = read_recording(table_of(branch), branch.key)
    # A damaged recording counts as missing, and is recorded again.
    with suppress(ValueError, TypeError, AttributeError, LookupError, AssertionError):
        segments = RecordedTable(json.loads(text or "")).segments(branch.key)
        in_block = isinstance(branch, BlockBranch)
        is_whole = segments.keys() == {name for name in SEGMENTS if (name in BLOCK_SEGMENTS) == in_block}
        return segments if is_whole else None
    return None


def recording_path(table: str, branch: str) -> Path | None:
    """Return the path for the recording of one branch; None without torch or DeepSpeed, which would make it."""
    name = _versions()
    return None if name is None else cache_folder() / name / f"{table}--{branch.replace(' ', '_')}.json"


def read_recording(table: str, branch: str) -> str | None:
    """Return the JSON text; None where it is missing."""
    path = recording_path(table, branch)
    try:
        return None if path is None else path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def write_recordings(texts: Mapping[tuple[str, str], str]) -> None:
    """Write JSON texts by table and branch, each atomically. Raises ConfigError."""
    for (table, branch), text in texts.items():
        path = recording_path(table, branch)
        assert path is not None, "torch has just recorded it"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text)
        except OSError as error:
            raise ConfigError(
                f"{path.parent} cannot be written, where recorded blocks are kept: {error.strerror or error}. Set "
                "XDG_CACHE_HOME to a folder that can."
            ) from None


def cache_folder() -> Path:
    """Return the folder for recordings of all versions."""
    return in_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llmscale" / "recorded"


@cache
def _versions() -> str | None:
    """Return a name for the code and the libraries; None without torch or DeepSpeed."""
    try:
        libraries = [f"{name}-{version(name)}" for name in ("torch", "deepspeed")]
    except PackageNotFoundError:
        return None
    package = Path(__file__).parents[2]
    hashes = [source_hashes(package / folder) for folder in _RECORDED_FROM]
    digest = hashlib.sha256(repr(hashes).encode()).hexdigest()
    return "_".join((f"llmscale-{__version__}-{digest[:12]}", *libraries))


def _size(formula: str, symbols: Mapping[str, int]) -> int:
    """Return bytes as the allocator rounds them; elements of a gradient."""
    kind, coefficient, names = _parsed(formula)
    size = coefficient[0] * prod(symbols[name] for name in names) // coefficient[1]
    return size if kind == "gradient" else allocated_bytes(size, 1)


@cache
def _parsed(formula: str) -> tuple[str, tuple[int, int], tuple[str, ...]]:
    kind, _, product = formula.partition(" ")
    coefficient, *names = product.split("*")
    numerator, _, denominator = coefficient.partition("/")
    return kind, (int(numerator), int(denominator or 1)), tuple(names)
