"""--profile A:B: a trace of those steps on rank 0, and a table of where their time went."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmscale.config.hardware import find_gpu
from llmscale.engine.train_step import Phase
from llmscale.errors import LlmscaleError
from llmscale.planning.step_time import predict_step_parts
from llmscale.training.inputs import parse_profiled
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.training.trace_shares import PARTS, PHASE, WHOLE, TraceShares, read_shares

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
