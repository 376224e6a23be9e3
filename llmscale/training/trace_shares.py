"""Shares of the wall time of profiled steps, from a trace in Chrome's format as torch.profiler writes it. No torch.

Every instant belongs to exactly one part, so the parts add up to the wall time. On a CPU it belongs to the operation
that runs, on a GPU to the operation that launched the running kernel. If several run at once, it belongs to the first
of PARTS: communication counts only where no arithmetic hides it. An instant at which nothing runs is `data` while the
step waits for its samples, and `idle` otherwise: the interpreter, or a host that launches kernels too late.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.errors import LlmscaleError
from llmscale.untrusted.documents import Rules, load_json

#: Parts in the order of their precedence.
PARTS = (
    *("matrix products", "attention", "norms", "loss", "optimizer", "other operations"),
    *("communication", "data", "idle"),
)
#: Annotations of the profiled steps, and of phases.
WHOLE, PHASE = "profiled steps", "phase: "
#: Parts by the name of an operation, of one that encloses it, or of a kernel; the first match wins. Matrix products in
#: attention and the optimizer belong to these; `loss` is without its matrix products.
_PATTERNS = (
    ("data", re.compile(rf"^{re.escape(PHASE)}data_wait$|^enumerate\(DataLoader\)")),
    ("communication", re.compile(r"^c10d::|^gloo:|^nccl|ncclDevKernel|ncclKernel")),
    ("optimizer", re.compile(rf"^Optimizer\.step|^{re.escape(PHASE)}optimizer_step$|multi_tensor_apply|FusedAdam")),
    ("attention", re.compile(r"scaled_dot_product|flash_attention|flash_fwd|flash_bwd|efficient_attention|fmha"
                             r"|ScaledDotProduct|FlashAttention|EfficientAttention", re.I)),
    ("matrix products", re.compile(r"^aten::(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|_addmm_activation|dot|mv)$"
                                   r"|gemm|cutlass|nvjet|wgmma|mkldnn_linear", re.I)),
    ("norms", re.compile(r"layer_?norm|rms_?norm", re.I)),
    ("loss", re.compile(r"CrossEntropy|cross_entropy|nll_loss|log_softmax")),
)  # fmt: skip
_MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class TraceShares:
    """Shares of the profiled steps on one rank."""

    wall_s: float
    seconds: Mapping[str, float]
    """Seconds by part; they add up to wall_s."""


#: Begin, end and part.
_Segment = tuple[float, float, str | None]


@dataclass
class _Span:
    """An event, and the one that encloses it in its thread."""

    begin: float
    end: float
    name: str
    is_annotation: bool
    parent: _Span | None = field(default=None, repr=False)

    def names(self) -> Iterator[str]:
        """Yield the names from the innermost span outwards."""
        span: _Span | None = self
        while span is not None:
            yield span.name
            span = span.parent


def read_shares(trace: Path) -> TraceShares:
    """Read a trace and return its shares. Raises LlmscaleError if it is malformed or lacks our annotations."""
    # The profiler does not limit the values of arguments.
    rules = Rules(LlmscaleError, max_bytes=_MAX_BYTES, not_finite=True, large_numbers=True)
    events = load_json(trace, rules).get("traceEvents")
    if not isinstance(events, list):
        raise LlmscaleError(f"{trace} holds a malformed list of events.")
    return shares_of_events(events)


def shares_of_events(events: Iterable[Mapping]) -> TraceShares:
    """Return the shares of events in Chrome's format, times in microseconds.

    Raises LlmscaleError if the annotation of the profiled steps is missing.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    frame = next((event for event in complete if event["name"] == WHOLE and event["cat"] == "user_annotation"), None)
    if frame is None:
        raise LlmscaleError(f"the trace lacks the annotation '{WHOLE}' of its steps.")
    begin, end = frame["ts"], frame["ts"] + frame["dur"]
    on_device = [event for event in complete if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_host = _nested([event for event in complete if event["cat"] in ("cpu_op", "user_annotation", "cuda_runtime")])
    segments: list[_Segment] = list(_phases_of_data(on_host))
    if on_device:
        segments += _of_kernels(on_device, complete, on_host)
    else:
        segments += [segment for spans in on_host.values() for segment in _innermost(spans)]
    seconds = _sweep(segments, begin, end)
    return TraceShares((end - begin) / 1e6, {part: seconds[part] / 1e6 for part in PARTS})


def part_of(span_names: Iterable[str], is_operation: bool) -> str | None:
    """Return the part of a span with these names, from the innermost outwards; None if it is only an annotation."""
    names = list(span_names)
    for part, pattern in _PATTERNS:
        if any(pattern.search(name) for name in names):
            return part if is_operation else None
    return "other operations" if is_operation else None


def _nested(events: Sequence[Mapping]) -> dict[object, list[_Span]]:
    """Return the spans of each thread in order of their begin, linked to their parents."""
    threads: dict[object, list[_Span]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        spans = threads.setdefault((event["pid"], event["tid"]), [])
        is_operation = event["cat"] == "cpu_op" or event["name"].startswith(("gloo:", "nccl", "Optimizer."))
        span = _Span(event["ts"], event["ts"] + event["dur"], event["name"], not is_operation)
        parent = spans[-1] if spans else None
        while parent is not None and parent.end < span.end:
            parent = parent.parent
        span.parent = parent
        spans.append(span)
    return threads


def _innermost(spans: Sequence[_Span]) -> Iterator[_Segment]:
    """Yield (begin, end, part) of the innermost span at every instant of a thread."""
    open_spans: list[_Span] = []
    now = 0.0

    def until(moment: float) -> Iterator[_Segment]:
        nonlocal now
        while open_spans and open_spans[-1].end <= moment:
            span = open_spans.pop()
            yield now, span.end, _part_of_span(span)
            now = max(now, span.end)
        if open_spans and now < moment:
            yield now, moment, _part_of_span(open_spans[-1])
        now = max(now, moment)

    for span in spans:
        yield from until(span.begin)
        open_spans.append(span)
    yield from until(max((span.end for span in spans), default=0.0))


def _part_of_span(span: _Span) -> str | None:
    return part_of(span.names(), not span.is_annotation)


def _phases_of_data(threads: Mapping[object, Sequence[_Span]]) -> Iterator[_Segment]:
    for spans in threads.values():
        for span in spans:
            if span.name == f"{PHASE}data_wait":
                yield span.begin, span.end, "data"


def _of_kernels(
    kernels: Sequence[Mapping], events: Sequence[Mapping], threads: Mapping[object, Sequence[_Span]]
) -> Iterator[_Segment]:
    """Yield the segments of kernels: the part of their own name, or of the operation that launched them."""
    launches = {
        event["args"]["correlation"]: _Span(event["ts"], event["ts"] + event["dur"], event["name"], True)
        for event in events
        if event["cat"] == "cuda_runtime" and "correlation" in event.get("args", {})
    }
    by_moment = {(span.begin, span.name): span for spans in threads.values() for span in spans}
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        span = by_moment.get((launch.begin, launch.name)) if launch else None
        names = [kernel["name"], *(span.names() if span else ())]
        yield kernel["ts"], kernel["ts"] + kernel["dur"], part_of(names, True)


def _sweep(segments: Sequence[_Segment], begin: float, end: float) -> dict[str, float]:
    """Return microseconds by part of [begin, end), counting each instant once."""
    rank = {part: number for number, part in enumerate(PARTS)}
    moments: list[tuple[float, int, int]] = []
    for first, last, part in segments:
        first, last = max(first, begin), min(last, end)
        if part is not None and last > first:
            moments += [(first, rank[part], 1), (last, rank[part], -1)]
    active, seconds, now = [0] * len(PARTS), dict.fromkeys(PARTS, 0.0), begin
    for moment, part_rank, change in [*sorted(moments), (end, 0, 0)]:
        running = next((number for number, count in enumerate(active) if count), rank["idle"])
        seconds[PARTS[running]] += moment - now
        now = moment
        active[part_rank] += change
    return seconds
