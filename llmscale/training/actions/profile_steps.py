"""--profile A:B: a trace of those steps on the main rank, and a table of where their time went."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmscale.config.hardware import find_gpu
from llmscale.engine.timing import Phase
from llmscale.errors import LlmscaleError
from llmscale.planning.step_time import predict_step_parts
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.training.profiling.profile_table import table_lines
from llmscale.training.profiling.profiled_steps import parse_profiled
from llmscale.training.profiling.trace_shares import PHASE, WHOLE, read_shares

FOLDER = "profile"


class ProfileSteps(StepAction):
    """From the end of step A-1 to the end of step B-1, with whatever else happens between: logging, saving,
    validation. The main rank alone: what it waits for the others is in its `communication`."""

    def __init__(self, live: LiveRun, steps: str) -> None:
        self._live, self._steps = live, steps
        first, behind = parse_profiled(steps)
        self._before, self._last = first - 1, min(behind - 1, live.run.resolved.total_steps)
        self._profiler: profile | None = None
        self._is_done = False
        self._whole = record_function(WHOLE)
        self._phase: record_function | None = None

    def begin(self, step: int) -> None:
        if self._profiler is not None or self._is_done:
            return  # begun again in a new run folder
        if step > self._before or self._last <= self._before:
            self._is_done = True
            if self._live.spikes.times_gone_back:
                return  # what there was to say was said before
            self._live.report(f"WARNING: --profile {self._steps}: this start goes from step {step + 1} to "
                              f"{self._live.run.resolved.total_steps}, so nothing is profiled")  # fmt: skip
        elif step == self._before:
            self._start()

    def due(self, step: int) -> bool:
        # No collectives, and nothing for the other ranks to do.
        return self._live.world.is_main and step in (self._before, self._last)

    def act(self, done: DoneStep) -> None:
        if done.step == self._before:
            self._start()
        elif self._profiler is not None:
            self._finish()

    def close(self) -> None:
        if self._profiler is not None:
            self._live.meter.phases.listener = None
            self._live.report(f"WARNING: --profile {self._steps}: the run left these steps before the last, so "
                              "nothing is written")  # fmt: skip
            with suppress(Exception):  # whatever ended the run is what counts
                self._profiler.stop()

    def _start(self) -> None:
        live = self._live
        if not live.world.is_main:
            return
        with live.meter.pause("profiling"):
            on_gpu = [ProfilerActivity.CUDA] if live.world.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.start()
            _synchronise()
        self._whole.__enter__()
        live.meter.phases.listener = self._enter_phase

    def _enter_phase(self, phase: Phase) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = record_function(f"{PHASE}{phase}")
        self._phase.__enter__()

    def _finish(self) -> None:
        live, profiler = self._live, self._profiler
        assert profiler is not None
        _synchronise()
        live.meter.phases.listener = None
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._whole.__exit__(None, None, None)
        with live.meter.pause("profiling"):
            profiler.stop()
            self._profiler, self._is_done = None, True
            # On the main rank alone: what ended the run here would leave the others waiting.
            try:
                self._write(profiler)
            except (OSError, LlmscaleError, KeyError, RuntimeError) as error:
                live.report(f"WARNING: --profile {self._steps}: nothing is written: {error}. Training goes on")

    def _write(self, profiler: profile) -> None:
        live, num_steps = self._live, self._last - self._before
        folder = live.run.config.run / FOLDER
        trace = folder / f"steps-{self._before + 1}-to-{self._last}.trace.json"
        folder.mkdir(exist_ok=True)
        partial = trace.with_name(f".{trace.name}.partial")
        partial.unlink(missing_ok=True)  # or what stands there leads elsewhere
        try:
            profiler.export_chrome_trace(str(partial))
            shares, predicted = read_shares(partial), self._predict()
            os.replace(partial, trace)
        finally:
            partial.unlink(missing_ok=True)
        live.report(
            f"profile of steps {self._before + 1} to {self._last} on rank 0, which the profiler itself slows down: "
            f"{trace} (open it in chrome://tracing or ui.perfetto.dev)"
        )
        for line in table_lines(shares, num_steps, predicted):
            live.report(f"  {line}")
        assert live.log is not None
        live.log.log_event(
            "profile",
            step=self._last,
            num_steps=num_steps,
            trace=str(trace),
            predicted_s=predicted,
            **asdict(shares),
        )

    def _predict(self) -> dict[str, float]:
        live, resolved = self._live, self._live.run.resolved
        gpu = find_gpu(live.world.device_name)
        if gpu is None or not resolved.optimizer.steps_shards:
            return {}
        compiled = live.run.compilation.backend is not None
        return predict_step_parts(resolved, gpu, gpus_per_node=max(live.world.ranks_per_node), compiled_blocks=compiled)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
