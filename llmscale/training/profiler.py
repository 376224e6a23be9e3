"""--profile A:B: a trace of those steps on rank 0, and torch's table of their operations."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmscale.engine.train_step import Phase
from llmscale.files.atomic_write import write_durably
from llmscale.training.inputs import parse_profiled
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult

FOLDER = "profile"
#: Operations in the table, those with most time of their own first.
_NUM_ROWS = 50
#: Widest name in the table, in characters; the names of kernels are much longer.
_NAME_WIDTH = 80


class ProfileSteps(StepAction):
    """Profiles from the end of step A-1 to the end of step B-1, including logging, saving and validation.

    On rank 0 alone: its waits for the others are part of its collectives.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO, steps: str, *, is_rollback: bool = False) -> None:
        """`is_rollback`: an earlier action of this start has reported steps that are not profiled."""
        self._run, self._engine, self._io, self._steps, self._is_rollback = run, engine, io, steps, is_rollback
        first, behind = parse_profiled(steps)
        self._before, self._last = first - 1, min(behind - 1, run.resolved.total_steps)
        self._profiler: profile | None = None
        self._whole = record_function("profiled steps")
        self._phase: record_function | None = None

    def begin(self, step: int) -> None:
        if step > self._before or self._last <= self._before:
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
        self._phase = record_function(f"phase: {phase}")
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
            self._profiler = None
            # An error here would end rank 0 alone and leave the others waiting.
            try:
                self._write(profiler)
            except (OSError, RuntimeError) as error:
                self._io.report(f"WARNING: --profile {self._steps}: nothing is written: {error}. Training continues")

    def _write(self, profiler: profile) -> None:
        io, folder = self._io, self._run.config.run / FOLDER
        name = f"steps-{self._before + 1}-to-{self._last}"
        trace, table = folder / f"{name}.trace.json", folder / f"{name}.table.txt"
        folder.mkdir(exist_ok=True)
        partial = trace.with_name(f".{trace.name}.partial")
        partial.unlink(missing_ok=True)  # a link here would redirect the write
        profiler.export_chrome_trace(str(partial))
        partial.replace(trace)
        column = "self_device_time_total" if self._run.world.device.type == "cuda" else "self_cpu_time_total"
        rows = profiler.key_averages()
        write_durably(table, rows.table(sort_by=column, row_limit=_NUM_ROWS, max_name_column_width=_NAME_WIDTH))
        io.report(
            f"profile of steps {self._before + 1} to {self._last} on rank 0, which the profiler itself slows down: "
            f"{trace} (open it in chrome://tracing or ui.perfetto.dev), {table.name} beside it"
        )
        num_steps = self._last - self._before
        io.log_event("profile", step=self._last, num_steps=num_steps, trace=str(trace), table=str(table))


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
