"""What the compiler did, once the first step is done."""

from __future__ import annotations

from llmscale.engine.collectives import gather
from llmscale.engine.compilation import BlockCompiler
from llmscale.files.buffered_log import warn_on_stderr
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.training.rank_differences import describe_ranks


class ReportCompilation(StepAction):
    """One line after the first step of this start: graphs and seconds, or the ranks where the compiler failed."""

    def __init__(self, live: LiveRun, compiler: BlockCompiler) -> None:
        self._live, self._compiler = live, compiler

    def due(self, step: int) -> bool:
        return step == self._live.first_step + 1

    def act(self, done: DoneStep) -> None:
        live, compiler = self._live, self._compiler
        failures = gather(live.world.control, compiler.failure)
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            live.report(
                f"WARNING: the compiler failed on {describe_ranks(failed)}, whose blocks run eagerly: "
                f"{failures[failed[0]]}. --compile off does not try."
            )
        elif not compiler.graphs:
            live.report("WARNING: torch compiled nothing, as where TORCHDYNAMO_DISABLE is set; blocks run eagerly.")
        if compiler.graphs:
            graphs = f"{compiler.graphs} graph{'s' if compiler.graphs > 1 else ''}"
            live.report(f"blocks: {graphs} compiled in {compiler.compile_s:.1f} s")
        # Each rank for itself: a later failure is no moment at which ranks meet.
        compiler.on_failure = self._warn

    def _warn(self, failure: str) -> None:
        rank = self._live.world.rank
        warn_on_stderr(f"WARNING: the compiler failed on rank {rank}, whose blocks run eagerly from now on: {failure}.")
