"""--profile A:B: a trace of those steps on rank 0, and a table of where their time went.

Shares of the wall time of profiled steps, from a trace in Chrome's format as torch.profiler writes it.

Every instant belongs to exactly one part, so the parts add up to the wall time. On a CPU it belongs to the operation
that runs, on a GPU to the operation that launched the running kernel. If several run at once, it belongs to the first
of PARTS: communication counts only where no arithmetic hides it. An instant at which nothing runs is `data` while the
step waits for its samples, and `idle` otherwise: the interpreter, or a host that launches kernels too late.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmscale.config.hardware import find_gpu
from llmscale.engine.train_step import Phase
from llmscale.errors import LlmscaleError
from llmscale.planning.step_time import predict_step_parts
from llmscale.training.inputs import parse_profiled
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.untrusted.documents import Rules, load_json

FOLDER = "profile"
#: Parts that the throughput model predicts as one.
_PREDICTED_TOGETHER = {"norms": "norms and other operations", "other operations": "norms and other operations"}


class ProfileSteps(StepAction):
    """Profiles from the end of step A-1 to the end of step B-1, including logging, saving and validation.

    On rank 0 alone: its waits for the others are in its `communication`.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO, steps: str, *, is_rollback: bool = False) -> None:
        """`is_rollback`: an earlier action of this start has reported steps that are not profiled."""
        self._run, self._engine, self._io, self._steps, self._is_rollback = run, engine, io, steps, is_rollback
        first, behind = parse_profiled(steps)
        self._before, self._last = first - 1, min(behind - 1, run.resolved.total_steps)
        self._profiler: profile | None = None
        self._is_done = False
        self._whole = record_function(WHOLE)
        self._phase: record_function | None = None

    def begin(self, step: int) -> None:
        if self._profiler is not None or self._is_done:
            return  # repeated for a run folder that was created again
        if step > self._before or self._last <= self._before:
            self._is_done = True
            if self._is_rollback:
                return
            self._io.report(f"WARNING: --profile {self._steps}: this start goes from step {step + 1} to "
                            f"{self._run.resolved.total_steps}, so nothing is profiled")  # fmt: skip
        elif step == self._before:
            self._start()

    def due(self, step: int) -> bool:
        # No collectives: the other ranks have nothing to do.
        return self._run.world.is_main and step in (self._before, self._last)

    def run(self, result: StepResult) -> None:
        if result.step == self._before:
            self._start()
        elif self._profiler is not None:
            self._finish()

    def close(self) -> None:
        if self._profiler is not None:
            self._engine.meter.phases.listener = None
            self._io.report(f"WARNING: --profile {self._steps}: the run left these steps before the last, so "
                            "nothing is written")  # fmt: skip
            with suppress(Exception):  # the error that ended the run counts
                self._profiler.stop()

    def _start(self) -> None:
        if not self._run.world.is_main:
            return
        with self._engine.meter.pause("profiling"):
            on_gpu = [ProfilerActivity.CUDA] if self._run.world.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.start()
            _synchronise()
        self._whole.__enter__()
        self._engine.meter.phases.listener = self._enter_phase

    def _enter_phase(self, phase: Phase) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = record_function(f"{PHASE}{phase}")
        self._phase.__enter__()

    def _finish(self) -> None:
        profiler, meter = self._profiler, self._engine.meter
        assert profiler is not None
        _synchronise()
        meter.phases.listener = None
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._whole.__exit__(None, None, None)
        with meter.pause("profiling"):
            profiler.stop()
            self._profiler, self._is_done = None, True
            # An error here would end rank 0 alone and leave the others waiting.
            try:
                self._write(profiler)
            except (OSError, LlmscaleError, KeyError, RuntimeError) as error:
                self._io.report(f"WARNING: --profile {self._steps}: nothing is written: {error}. Training continues")

    def _write(self, profiler: profile) -> None:
        io, num_steps = self._io, self._last - self._before
        folder = self._run.config.run / FOLDER
        trace = folder / f"steps-{self._before + 1}-to-{self._last}.trace.json"
        folder.mkdir(exist_ok=True)
        partial = trace.with_name(f".{trace.name}.partial")
        partial.unlink(missing_ok=True)  # a link here would redirect the write
        try:
            profiler.export_chrome_trace(str(partial))
            shares, predicted = read_shares(partial), self._predict()
            os.replace(partial, trace)
        finally:
            partial.unlink(missing_ok=True)
        io.report(
            f"profile of steps {self._before + 1} to {self._last} on rank 0, which the profiler itself slows down: "
            f"{trace} (open it in chrome://tracing or ui.perfetto.dev)"
        )
        for line in table_lines(shares, num_steps, predicted):
            io.report(f"  {line}")
        io.log_event(
            "profile",
            step=self._last,
            num_steps=num_steps,
            trace=str(trace),
            predicted_s=predicted,
            **asdict(shares),
        )

    def _predict(self) -> dict[str, float]:
        world, resolved = self._run.world, self._run.resolved
        gpu = find_gpu(world.device_name)
        if gpu is None or not resolved.optimizer.steps_shards:
            return {}
        compiled = self._run.start.compilation.backend is not None
        return predict_step_parts(resolved, gpu, gpus_per_node=max(world.ranks_per_node), compiled_blocks=compiled)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table_lines(shares: TraceShares, num_steps: int, predicted: Mapping[str, float]) -> Iterator[str]:
    """Yield the table of measured parts beside those that `llmscale plan` predicts.

    `predicted`: seconds per step by part, with the names of llmscale.planning.step_time; others are not modelled.
    """
    yield f"{'part':<18}{'share':>8}{'ms a step':>12}{'plan, ms':>12}"
    for part in PARTS:
        seconds = shares.seconds[part]
        measured = f"{seconds / shares.wall_s:>8.1%}{_ms(seconds / num_steps):>12}"
        yield f"{part:<18}{measured}{_predicted(part, predicted):>12}"
    total = _ms(sum(predicted.values())) if predicted else "-"
    yield f"{'a step':<18}{1:>8.1%}{_ms(shares.wall_s / num_steps):>12}{total:>12}"
    if "norms and other operations" in predicted:
        yield "plan predicts norms and other operations as one: its number is beside the latter"


def _predicted(part: str, predicted: Mapping[str, float]) -> str:
    name = _PREDICTED_TOGETHER.get(part, part)
    return "-" if part == "norms" or name not in predicted else _ms(predicted[name])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


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
